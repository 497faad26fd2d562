"""Command lines of a small run, and the process state that parts of the trainer ask for."""

import os
import re

import pytest

LAUNCHER_AND_OURS = re.compile("RANK|WORLD_SIZE|LOCAL_.*|MASTER_.*|TENSOR_SAVE_.*|CUSTOM_QUANT_TYPE")
SMALL_RUN = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "micro_batch_size": 1,
    "train_iters": 4,
    "lr": 1e-3,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 100,
}


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    """What the launcher and the user's shell say about runs is not about these tests."""
    for name in filter(LAUNCHER_AND_OURS.fullmatch, list(os.environ)):
        monkeypatch.delenv(name)


@pytest.fixture
def command():
    """`command(**changes)` -> the argument list of a small run; None leaves a flag out, True gives a switch."""

    def build(**changes):
        words = []
        for name, value in (SMALL_RUN | changes).items():
            if value is not None:
                values = [] if value is True else value if isinstance(value, list | tuple) else [value]
                words += [f"--{name.replace('_', '-')}", *map(str, values)]
        return words

    return build


@pytest.fixture
def parse(command):
    """`parse(**changes)` -> the checked arguments of a small run."""
    from megatron.training.arguments import parse_arguments

    return lambda **changes: parse_arguments(command(**changes))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Process group and model parallel state of a single rank; left again, unless they were there before."""
    import torch.distributed as dist

    from megatron.core import parallel_state
    from megatron.training import cpu_device

    cpu_device.install_core()
    ours_to_leave = not dist.is_initialized(), not parallel_state.model_parallel_is_initialized()
    if ours_to_leave[0]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if ours_to_leave[1]:
        parallel_state.initialize_model_parallel()
    yield
    if ours_to_leave[1]:
        parallel_state.destroy_model_parallel()
    if ours_to_leave[0]:
        dist.destroy_process_group()


@pytest.fixture
def corpus(tmp_path):
    """`corpus(name, first, documents)` -> prefix of documents of 33 tokens that count on from `first`."""
    import numpy as np
    import torch

    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    def write(name, first=0, documents=16, length=33):
        builder = IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.uint16)
        for document in range(documents):
            start = first + document * length
            builder.add_document(torch.arange(start, start + length), [length])
        builder.finalize(str(tmp_path / f"{name}.idx"))
        return str(tmp_path / name)

    return write


@pytest.fixture
def build_data(parse):
    """`build_data(**changes)` -> (arguments, datasets) of a small run over files; samples of 16 tokens."""
    from megatron.training.data.datasets import build_datasets
    from megatron.training.data.tokenizer import build_tokenizer

    def run(**changes):
        small = {"mock_data": None, "seq_length": 16, "vocab_size": 60000, "eval_iters": 0}
        args = parse(**(small | changes))
        return args, build_datasets(args, build_tokenizer(args))

    return run
