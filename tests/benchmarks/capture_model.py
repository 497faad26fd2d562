"""The micro-model whose step capture is measured against: megatron-core through the overlay, on the CPU, fp32.

A GPT of 4 layers, hidden 512, 8 heads and an MLP of four times that, 1000 words, 4 samples of 256 tokens, AdamW: 13.6 M
parameters, a step of about a second of one core.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SEED = 1
LEARNING_RATE = 1e-3
MLP_FACTOR = 4
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of malloc.h
NEVER = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Size:
    """What the micro-model is made of; one micro-batch a step."""

    layers: int = 4
    hidden: int = 512
    heads: int = 8
    sequence: int = 256
    batch: int = 4
    words: int = 1000


MICRO = Size()
TINY = Size(layers=1, hidden=32, heads=2, sequence=32, batch=2, words=64)  # to see that the program runs


def start_process(folder: Path) -> None:
    """One thread, one rank, and megatron-core as it is on a machine without a GPU; `folder` holds the rendezvous."""
    torch.set_num_threads(1)
    _keep_freed_memory()
    from megatron.training import cpu_device

    cpu_device.install()
    from megatron.core import parallel_state, tensor_parallel

    cpu_device.install_core()
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)


def _keep_freed_memory() -> None:
    """Have malloc keep what is freed: else a step faults its memory in anew or not as the heap happens to lie."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # glibc
        library.mallopt(M_TRIM_THRESHOLD, NEVER)
        library.mallopt(M_MMAP_MAX, 0)


def batch_of(size: Size, step: int) -> torch.Tensor:
    """Token ids [batch, sequence + 1] of one step, the same whenever it is asked for."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(size.words, (size.batch, size.sequence + 1), generator=generator)


class Trainer:
    """A model, its optimizer and how often it has stepped. All trainers of one size begin alike."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.model = _build(size)
        self.steps = 0
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self._positions = torch.arange(size.sequence)[None]

    def watch(self, session: Any) -> None:
        """Show the tensors of the following steps to `session`; they are given it to say where training stands."""
        from megatron.core.instrumentation import instrument

        instrument([self.model], recipe=None, session=session, num_layers=self.size.layers)

    def step(self, session: Any = None) -> float:
        """Train one step, inside one iteration of `session` where there is one; returns the loss."""
        ids = batch_of(self.size, self.steps)
        if session is not None:
            first = self.steps * self.size.batch
            session.begin_iteration(self.steps)
            session.begin_micro_batch(0, range(first, first + self.size.batch))
        self._optimizer.zero_grad(set_to_none=True)
        loss = self.model(ids[:, :-1], self._positions, None, labels=ids[:, 1:]).mean()
        loss.backward()
        self._optimizer.step()
        value = loss.item()
        if session is not None:
            session.end_iteration({"lm loss": value})
        self.steps += 1
        return value

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def equals(self, other: Trainer) -> bool:
        """Whether both models hold the same bits."""
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        return all(torch.equal(own, its) for own, its in pairs)


def _build(size: Size) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(SEED)
    config = TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        ffn_hidden_size=MLP_FACTOR * size.hidden,
        num_attention_heads=size.heads,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=size.words,
        max_sequence_length=size.sequence,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
