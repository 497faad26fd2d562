"""The CPU that stands in for CUDA: each answer of its tables, and that it keeps away from a real GPU."""

import pytest
import torch

from megatron.training import cpu_device

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is answered")
CPU = torch.device("cpu")
LIKE = torch.arange(6.0).reshape(2, 3)
# Arguments of each factory; what is random is only looked at from outside.
ARGUMENTS = {
    "arange": (5,),
    "as_tensor": ([1.0, 2.0],),
    "empty": (2, 3),
    "empty_like": (LIKE,),
    "empty_strided": ((2, 3), (3, 1)),
    "eye": (3,),
    "full": ((2, 3), 7.0),
    "full_like": (LIKE, 7.0),
    "linspace": (0, 1, 5),
    "ones": (2, 3),
    "ones_like": (LIKE,),
    "rand": (2, 3),
    "rand_like": (LIKE,),
    "randint": (0, 9, (2, 3)),
    "randn": (2, 3),
    "randn_like": (LIKE,),
    "randperm": (5,),
    "tensor": ([1.0, 2.0],),
    "tril_indices": (3, 3),
    "triu_indices": (3, 3),
    "zeros": (2, 3),
    "zeros_like": (LIKE,),
}
UNINITIALISED = {"empty", "empty_like", "empty_strided"}
DEVICES = ["cuda", "cuda:1", 0, torch.device("cuda"), torch.device("cuda", 1), "cpu", CPU, None]


def replaced():
    """Everything that `install` replaces: (owner, name) -> what stands there now."""
    owners = dict.fromkeys((*cpu_device.FACTORIES, "compile"), torch)
    places = [(owner, name) for name, owner in owners.items()]
    places += [(torch.distributed, "barrier")]
    places += [(torch.Tensor, name) for name in cpu_device.TENSOR_ANSWERS]
    places += [(torch.cuda.nvtx, name) for name in ("range_push", "range_pop")]
    places += [(torch.cuda, name) for name in cpu_device.CUDA_ANSWERS if "." not in name]
    return {(owner.__name__, name): getattr(owner, name) for owner, name in places}


@needs_no_gpu
class TestFactories:
    def test_each_has_arguments_here(self):
        assert set(ARGUMENTS) == set(cpu_device.FACTORIES)

    @pytest.mark.parametrize("device", DEVICES, ids=str)
    @pytest.mark.parametrize("name", cpu_device.FACTORIES)
    def test_any_device_is_the_cpu(self, name, device):
        factory = getattr(torch, name)
        torch.manual_seed(5)
        made = factory(*ARGUMENTS[name], device=device)
        torch.manual_seed(5)
        expected = factory(*ARGUMENTS[name])
        assert (made.device, made.shape, made.dtype) == (CPU, expected.shape, expected.dtype)
        if name not in UNINITIALISED:
            assert torch.equal(made, expected)

    def test_pinned_memory_is_ordinary(self):
        assert torch.empty(3, pin_memory=True).shape == (3,)
        assert not torch.zeros(3, pin_memory=True, device="cuda").is_pinned()

    def test_other_devices_are_left_alone(self):
        assert torch.empty(2, device="meta").device == torch.device("meta")
        with pytest.raises(RuntimeError):
            torch.empty(2, device="nonsense")


@needs_no_gpu
class TestTensors:
    @pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda")], ids=str)
    def test_to_a_gpu_stays_here(self, device):
        assert LIKE.to(device) is LIKE
        assert LIKE.to(device=device) is LIKE
        assert LIKE.to(device, torch.float16, non_blocking=True).dtype == torch.float16
        assert LIKE.cuda(device) is LIKE

    def test_to_what_it_always_did(self):
        assert LIKE.to(torch.int64).dtype == torch.int64
        assert LIKE.to(LIKE.double()).dtype == torch.float64
        assert LIKE.to("meta").device.type == "meta"
        assert LIKE.to(torch.float32, copy=True) is not LIKE

    @pytest.mark.parametrize(
        ("dtype", "name"),
        [
            (torch.float32, "torch.cuda.FloatTensor"),
            (torch.float16, "torch.cuda.HalfTensor"),
            (torch.bfloat16, "torch.cuda.BFloat16Tensor"),
        ],
    )
    def test_type_is_what_the_optimizers_compare_with(self, dtype, name):
        assert LIKE.to(dtype).type() == name

    def test_type_as_a_conversion(self):
        assert LIKE.type(torch.int32).dtype == torch.int32
        assert LIKE.type(dtype=torch.float64).dtype == torch.float64

    def test_modules_move_nowhere(self):
        layer = torch.nn.Linear(2, 2)
        weight = layer.weight
        assert layer.cuda(torch.cuda.current_device()).weight is weight


@needs_no_gpu
class TestCuda:
    def test_device(self, monkeypatch):
        assert torch.cuda.current_device() == CPU
        assert torch.cuda.device_count() == 1
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        assert torch.cuda.device_count() == 4

    @pytest.mark.parametrize("name", cpu_device.NOTHING_TO_DO)
    def test_nothing_to_do(self, name):
        owner, _, function = name.rpartition(".")
        assert getattr(getattr(torch.cuda, owner) if owner else torch.cuda, function)() is None

    @pytest.mark.parametrize("name", cpu_device.NO_BYTES)
    def test_no_gpu_memory_is_in_use(self, name):
        assert getattr(torch.cuda, name)() == 0

    def test_random_state_is_the_cpus(self):
        torch.cuda.manual_seed(11)
        assert torch.cuda.initial_seed() == 11
        state = torch.cuda.get_rng_state()
        first = torch.rand(3)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)
        assert torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(11)))

    def test_streams_and_events(self):
        stream, event = torch.cuda.Stream(priority=-1), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream), stream:
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            event.record(stream)
            stream.wait_event(event)
            stream.synchronize()
        event.wait()
        event.synchronize()
        assert stream.query()
        assert event.query()
        assert stream.record_event(event) is event
        assert isinstance(stream.record_event(), torch.cuda.Event)
        assert event.elapsed_time(torch.cuda.Event()) == 0.0
        assert stream.cuda_stream == 0

    def test_an_exception_leaves_a_stream(self):
        with pytest.raises(KeyError), torch.cuda.Stream():
            raise KeyError

    def test_compile_gives_the_function_back(self):
        def function():
            return 3

        assert torch.compile(function) is function
        assert torch.compile(dynamic=True)(function) is function

    def test_barrier_takes_device_ids(self, one_rank):
        torch.distributed.barrier(device_ids=[0])

    def test_generators_of_megatron_core_are_the_cpus(self, one_rank):
        from megatron.core.tensor_parallel import random

        state = random._get_cuda_rng_state()
        first = torch.rand(3)
        random._set_cuda_rng_state(state)
        assert torch.equal(torch.rand(3), first)


@needs_no_gpu
class TestInstall:
    def test_again_changes_nothing(self):
        before = replaced()
        cpu_device.install()
        after = replaced()
        assert all(after[place] is before[place] for place in before)

    def test_each_answer_is_an_object_of_its_own(self):
        answers = list(replaced().values())
        assert len({id(answer) for answer in answers}) == len(answers)  # else torch._dynamo refuses to import

    def test_a_gpu_is_left_alone(self, monkeypatch):
        from megatron.core.tensor_parallel import random

        before, core = replaced(), (object(), object())
        monkeypatch.setattr(random, "_get_cuda_rng_state", core[0])
        monkeypatch.setattr(random, "_set_cuda_rng_state", core[1])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.delattr(torch.cuda, "answered_by")
        cpu_device.install()
        cpu_device.install_core()
        after = replaced()
        assert all(after[place] is before[place] for place in before)
        assert not hasattr(torch.cuda, "answered_by")
        assert (random._get_cuda_rng_state, random._set_cuda_rng_state) == core

    def test_seeding_torch_still_works(self):
        torch.manual_seed(3)  # calls torch.cuda.manual_seed_all, which must not be answered
        assert torch.initial_seed() == 3


@needs_no_gpu
def test_numbers_of_tokens_come_to_the_host_as_they_were_asked_for(one_rank):
    """Splits of an all-to-all are lists of numbers to torch.distributed; a tensor is none."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    counts = torch.tensor([3, 0, 5])
    for module in (moe_utils, token_dispatcher):
        assert module.maybe_move_tensor_to_cpu(counts, as_numpy=True).tolist() == [3, 0, 5]
        assert not torch.is_tensor(module.maybe_move_tensor_to_cpu(counts, as_numpy=True))
        assert module.maybe_move_tensor_to_cpu(counts, record_stream=True) is counts
        assert module.maybe_move_tensor_to_cpu(None, as_numpy=True) is None
    assert hasattr(moe_utils, "te_general_gemm")  # the router asks for it, with TransformerEngine and without
