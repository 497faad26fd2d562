"""Llama 3.1's rotary frequencies, against megatron-core's own."""

import pytest
import torch

from script.model.rope_scaling import llama3_divisors


@pytest.mark.parametrize(("head_width", "base", "factor"), [(64, 500000.0, 32.0), (128, 500000.0, 8.0), (16, 1e4, 4.0)])
def test_as_megatron_computes_them(head_width, base, factor):
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    plain, scaled = (
        RotaryEmbedding(head_width, rotary_percent=1.0, rotary_base=base, rope_scaling=scaling,
                        rope_scaling_factor=factor, use_cpu_initialization=True).inv_freq
        for scaling in (False, True)
    )  # fmt: skip
    divisors = torch.from_numpy(llama3_divisors(head_width, base, factor)).float()
    torch.testing.assert_close(plain.cpu() / divisors, scaled.cpu(), rtol=1e-5, atol=0)
    assert divisors.min() == 1
    assert divisors.max() == pytest.approx(factor)
