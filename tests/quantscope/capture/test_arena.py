"""Memory that is lent by size: against a model that knows of every byte who has it."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.quantscope.capture import CaptureError
from megatron.quantscope.capture import arena as arena_module
from megatron.quantscope.capture.arena import ALIGNMENT, HostArena

PATIENCE_S = 10
CELLS = 16  # of ALIGNMENT bytes each, in the arenas here


def cells_of(size):
    """How many cells `size` bytes take; an empty tensor's take one."""
    return max(1, (size + ALIGNMENT - 1) // ALIGNMENT)


def lowest_fit(owners, wanted):
    """The model: the first cell of the lowest gap that is wide enough; None: there is none."""
    for first in range(len(owners) - wanted + 1):
        if not any(owners[first : first + wanted]):
            return first
    return None


@settings(deadline=None)
@given(st.data())
def test_leases_are_where_the_model_says(data):
    arena, owners, leases, peak = HostArena(CELLS * ALIGNMENT), [None] * CELLS, {}, 0
    for number in range(1, data.draw(st.integers(1, 40)) + 1):
        size = data.draw(st.integers(0, 6 * ALIGNMENT))
        place = lowest_fit(owners, cells_of(size))
        if leases and (place is None or data.draw(st.booleans())):
            victim = data.draw(st.sampled_from(sorted(leases)))
            leases.pop(victim).give_back()
            owners = [None if owner == victim else owner for owner in owners]
        elif place is not None:
            lease = arena.take(size)
            assert (lease.offset, lease.size) == (place * ALIGNMENT, size)
            assert not any(owners[place : place + cells_of(size)])
            owners[place : place + cells_of(size)] = [number] * cells_of(size)
            leases[number] = lease
        peak = max(peak, sum(owner is not None for owner in owners))
    assert arena.peak_bytes == peak * ALIGNMENT <= CELLS * ALIGNMENT
    assert arena.waited_seconds == 0.0
    for lease in leases.values():
        lease.give_back()
    assert arena.take(CELLS * ALIGNMENT).offset == 0  # everything came back, in one piece


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 2 * CELLS * ALIGNMENT), min_size=1, max_size=60), st.integers(0, 2**32))
def test_with_threads_that_give_back_the_bound_holds_and_nothing_is_written_over(sizes, salt):
    arena, out, lock, problems = HostArena(CELLS * ALIGNMENT), [], threading.Lock(), []

    def use(lease, stamp):
        content = lease.buffer[lease.offset : lease.offset + lease.size]
        if content != stamp * lease.size:
            problems.append("somebody else wrote there")
        with lock:
            out.remove(lease.size)
        lease.give_back()

    threads = []
    for number, size in enumerate(sizes):
        lease, stamp = arena.take(size), bytes([(salt + number) % 251 + 1])
        with lock:
            out.append(size)
            held = [cells_of(each) for each in out]
        if sum(held) > CELLS and len(held) > 1:
            problems.append(f"{held} cells are out of {CELLS}")
        lease.buffer[lease.offset : lease.offset + size] = stamp * size
        threads.append(threading.Thread(target=use, args=(lease, stamp)))
        threads[-1].start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert problems == []
    assert arena.peak_bytes <= max(CELLS, *map(cells_of, sizes)) * ALIGNMENT


class TestWaiting:
    def waiting(self, arena, size, taken):
        thread = threading.Thread(target=lambda: taken.append(arena.take(size)))
        thread.start()
        time.sleep(0.05)
        return thread

    def test_for_room_and_no_longer(self):
        arena, taken = HostArena(100 * ALIGNMENT), []
        first, second = arena.take(50 * ALIGNMENT), arena.take(50 * ALIGNMENT)
        thread = self.waiting(arena, 1, taken)
        assert taken == []
        second.give_back()
        thread.join(PATIENCE_S)
        assert taken[0].offset == 50 * ALIGNMENT
        assert 0.04 < arena.waited_seconds < PATIENCE_S
        assert arena.peak_bytes == 100 * ALIGNMENT
        first.give_back()

    def test_for_room_in_one_piece(self):
        arena, taken = HostArena(3 * ALIGNMENT), []
        leases = [arena.take(ALIGNMENT) for _ in range(3)]
        leases[0].give_back()
        leases[2].give_back()
        thread = self.waiting(arena, 2 * ALIGNMENT, taken)
        assert taken == []  # two are free, and not side by side
        leases[1].give_back()
        thread.join(PATIENCE_S)
        assert taken[0].offset == 0

    def test_what_is_larger_than_the_bound_waits_for_all_else_and_goes_alone(self):
        arena, taken = HostArena(10 * ALIGNMENT), []
        small = arena.take(1)
        thread = self.waiting(arena, 500 * ALIGNMENT, taken)
        assert taken == []
        small.give_back()
        thread.join(PATIENCE_S)
        large = taken.pop()
        assert len(large.buffer) == 500 * ALIGNMENT
        thread = self.waiting(arena, 1, taken)
        assert taken == []  # nothing goes beside it
        large.give_back()
        thread.join(PATIENCE_S)
        assert taken[0].offset == 0
        assert arena.peak_bytes == 500 * ALIGNMENT


def test_what_comes_after_waiting_is_counted_once():
    arena, taken = HostArena(ALIGNMENT), []
    for _ in range(3):
        lease = arena.take(1)
        thread = threading.Thread(target=lambda: taken.append(arena.take(1)))
        thread.start()
        time.sleep(0.02)
        lease.give_back()
        thread.join(PATIENCE_S)
        taken.pop().give_back()
    assert 0.05 < arena.waited_seconds < PATIENCE_S
    assert arena.peak_bytes == ALIGNMENT


def test_a_bound_below_one_alignment_is_one_alignment():
    assert HostArena(1).take(ALIGNMENT).offset == 0


def test_memory_that_the_system_does_not_have_is_told(monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(arena_module.mmap, "mmap", refuse)
    with pytest.raises(CaptureError, match="no memory for 1024 bytes of tensors: lower --tensor-host-memory-gb"):
        HostArena(1024).take(1)


def test_after_close_no_memory_is_kept():
    arena = HostArena(1 << 20)
    lease = arena.take(10)
    mapping = lease.buffer
    lease.give_back()
    arena.close()
    assert arena._mapping is None
    mapping.close()  # raises while anything still looks at it
