"""Segments hold every content once, and a row of a committed iteration never needs a later one."""

import threading

import torch

from megatron.quantscope.capture import open_capture
from megatron.quantscope.capture import sink as sink_module
from tests.quantscope.capture.conftest import (
    LINEAR,
    ROWS_A_PASS,
    bits,
    check_readable,
    header_of,
    linear_tensors,
    manifest_of,
    read,
    run_folder,
    run_iteration,
    stored_tensor,
)

PATIENCE_S = 20


class TestNoByteTwice:
    def unique_bytes(self, session, capture):
        """What the rows' contents come to, each different one counted once."""
        rows = manifest_of(session, "tensor")
        contents = {bytes(bits(stored_tensor(session, row)).numpy()) for row in rows}
        assert len(capture.records) == len(rows)
        return sum(map(len, contents)), len(contents)

    def bytes_on_disk(self, session):
        found = []
        for path in run_folder(session).glob("*.safetensors"):
            _, header = header_of(path)
            header.pop("__metadata__")
            found += [e["data_offsets"][1] - e["data_offsets"][0] for n, e in header.items() if n[:8] != "padding_"]
        return sum(found), len(found)

    def test_over_rows_modules_micro_batches_and_iterations(self, open_session):
        session = open_session(save_format="segment", control_iter=3, collect_micro_batches=2)
        sites = [session.site(**(LINEAR | {"module": f"decoder.layers.{n}.fc", "layer_idx": n})) for n in range(3)]
        tensors = linear_tensors(0)
        for iteration in range(3):
            session.begin_iteration(iteration)
            for micro_batch in range(2):
                session.begin_micro_batch(micro_batch, [micro_batch])
                before = torch.full((3, 4), float(micro_batch))
                for site in sites:
                    tap, after = site.tap(), before + 1
                    tap("forward", "pre", "input", before)
                    tap("forward", "pre", "weight", tensors["weight"])
                    tap("forward", "post", "output", after)  # the next one's input
                    tap("backward", "pre", "weight", tensors["weight"])
                    before = after
            session.end_iteration({})
        capture = read(session)
        assert self.unique_bytes(session, capture) == self.bytes_on_disk(session)
        weights = [record for record in capture.records if record.tensor_name == "weight"]
        assert len({(record.path, record.offset) for record in weights}) == 1
        assert sum(not record.reference for record in weights) == 1
        for record in weights:
            assert torch.equal(capture.load(record), tensors["weight"])

    def test_over_dtypes_and_shapes(self, open_session):
        """Bytes are bytes; each row says how to look at them."""
        session, base = open_session(save_format="segment"), torch.arange(32.0)
        shown = [base, base.reshape(4, 8), base.view(torch.int32), base.view(torch.bfloat16), base.view(torch.uint8)]
        tensors = dict(zip(linear_tensors(), [*shown, torch.zeros(2)], strict=True))
        run_iteration(session, 0, tensors=tensors)
        capture = read(session)
        assert self.bytes_on_disk(session) == (128 + 8, 2)
        for record in capture.records:
            loaded, expected = capture.load(record), tensors[record.tensor_name]
            assert (loaded.dtype, loaded.shape) == (expected.dtype, expected.shape)
            assert torch.equal(bits(loaded), bits(expected))

    def test_what_is_equal_to_the_eye_only_is_kept_apart(self, open_session):
        session = open_session(save_format="segment")
        tensors = linear_tensors() | {"input": torch.zeros(8), "output": torch.full((8,), -0.0)}
        run_iteration(session, 0, tensors=tensors)
        capture = read(session)
        signs = {record.tensor_name: capture.load(record).signbit().any() for record in capture.records}
        assert (bool(signs["input"]), bool(signs["output"])) == (False, True)

    def test_maps_of_block_exponents_too(self, open_session):
        session = open_session(save_format="segment", mode="both", control_iter=2)
        for iteration in range(2):
            run_iteration(session, iteration, tensors=linear_tensors(0))
        capture = read(session)
        places = [(row["blocks"]["file"], row["blocks"]["offset"]) for row in manifest_of(session, "tensor")]
        assert len(set(places)) <= 6
        check_readable(capture, lambda iteration: linear_tensors(0))

    def test_a_row_never_refers_to_a_later_iteration(self, open_session, monkeypatch):
        """The two writers may take the last rows of one iteration and the first of the next in any order."""
        session = open_session(save_format="segment", mode="both", control_iter=0)
        writer, held = session._sink._writer, []
        with monkeypatch.context() as held_back:
            held_back.setattr(writer, "submit", held.append)
            for iteration in range(2):
                run_iteration(session, iteration, tensors=linear_tensors(0))
        first, second = held[: len(held) // 2], held[len(held) // 2 :]
        other_writer = threading.Thread(target=lambda: [task() for task in second])
        other_writer.start()
        for task in first:
            task()
        other_writer.join(PATIENCE_S)
        capture = read(session)
        for row in manifest_of(session, "tensor"):
            assert row["file"].startswith("iter000")
            assert row["blocks"]["file"].startswith("iter000")
            assert row["reference"] or row["iteration"] == 0
        assert len(capture.records) == 2 * ROWS_A_PASS


def test_more_rows_than_modules_promised(open_session, monkeypatch):
    monkeypatch.setattr(sink_module, "_ROWS_A_SITE", 0)
    session = open_session(save_format="segment", mode="both")
    sites = [session.site(**(LINEAR | {"module": f"fc{number}"})) for number in range(20)]
    session.begin_iteration(0)
    session.begin_micro_batch(0, [0])
    for number, site in enumerate(sites):
        site.tap()("forward", "pre", "input", torch.full((40,), float(number)))
    session.end_iteration({})
    capture = read(session)
    assert [line["kind"] for line in manifest_of(session)][:2] == ["segment", "segment"]
    for number, record in enumerate(capture.records):
        assert torch.equal(capture.load(record), torch.full((40,), float(number)))


def test_two_runs_have_segments_of_their_own(open_session):
    """Also when the second one's content is on disk already, in the first one's folder."""
    for run_id in ("20250101_000000_aaaaaa", "20250102_000000_bbbbbb"):
        session = open_session(save_format="segment", run_id=run_id)
        run_iteration(session, 0)
        read(session)
    for run_id in ("20250101_000000_aaaaaa", "20250102_000000_bbbbbb"):
        capture = open_capture(session.config.directory, run=run_id)
        assert {record.path.parent.name for record in capture.records} == {run_id}
        check_readable(capture)
