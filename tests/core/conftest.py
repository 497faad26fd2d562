"""A small Llama of megatron-core in this process: one rank, gloo, fp32."""

import os

import pytest
import torch

from megatron.quantscope.capture import CaptureConfig, CaptureSession, ParallelCoordinates


class MemorySession(CaptureSession):
    """A capture session whose rows stay in memory: [(metadata, tensor)], in the order in which they were shown."""

    def __init__(self, directory, **settings):
        config = CaptureConfig(directory=directory, **settings)
        super().__init__(
            config, quant_type="fp32", rank=0, parallel=ParallelCoordinates(), run_id="memory", run_info={}
        )
        self.rows = []

    def keep(self, tensor, shown):
        self.rows.append((shown.metadata(tuple(tensor.shape), tensor.dtype), tensor.detach().clone()))


@pytest.fixture
def open_session(tmp_path):
    """`open_session(**settings)` -> a running MemorySession of CaptureConfig(**settings); closed after the test."""
    sessions = []

    def opened(**settings):
        sessions.append(MemorySession(tmp_path / str(len(sessions)), **settings))
        return sessions[-1]

    yield opened
    for session in sessions:
        session.close()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Process group and model parallel state of a single rank; left again, unless they were there before."""
    import torch.distributed as dist

    from megatron.core import parallel_state, tensor_parallel
    from megatron.training import cpu_device

    cpu_device.install_core()
    group_is_ours, state_is_ours = not dist.is_initialized(), not parallel_state.model_parallel_is_initialized()
    if group_is_ours:
        store = tmp_path_factory.mktemp("store") / "rendezvous"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    if state_is_ours:
        parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield os.getpid()
    if state_is_ours:
        parallel_state.destroy_model_parallel()
    if group_is_ours:
        dist.destroy_process_group()


@pytest.fixture
def build_model(one_rank):
    """`build_model(**overrides)` -> a GPTModel of 2 layers; overrides go to its TransformerConfig."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    def build(**overrides):
        torch.manual_seed(3)
        settings = {
            "num_layers": 2,
            "hidden_size": 64,
            "ffn_hidden_size": 96,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "apply_rope_fusion": False,
        }
        config = TransformerConfig(**(settings | overrides))
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        return GPTModel(config, spec, vocab_size=128, max_sequence_length=32, position_embedding_type="rope")

    return build


@pytest.fixture
def gradients():
    """`gradients(model)` -> (loss, {parameter: gradient}) of one fixed micro-batch."""

    def run(model):
        ids = (torch.arange(33) * 7 % 128)[None]
        position = torch.arange(32)[None]
        model.zero_grad(set_to_none=True)
        loss = model(ids[:, :-1], position, None, labels=ids[:, 1:]).mean()
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()}

    return run
