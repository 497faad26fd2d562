import math

import torch


class DotProductAttention(torch.nn.Module):
    """Causal attention of [s, b, heads, d] to [s, b, groups, d], result [s, b, heads * d]; no dropout."""

    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        num_gqa_groups=None,
        attention_dropout=0.0,
        attn_mask_type="causal",
        tp_size=1,
        tp_group=None,
        softmax_scale=None,
        **_,
    ):
        super().__init__()
        assert attention_dropout == 0
        self.scale = softmax_scale or 1 / math.sqrt(kv_channels)

    def forward(self, query_layer, key_layer, value_layer, attention_mask=None, attn_mask_type=None, **_):
        assert attn_mask_type == "causal"
        shared = query_layer.size(2) // key_layer.size(2)
        key, value = (tensor.repeat_interleave(shared, dim=2) for tensor in (key_layer, value_layer))
        scores = torch.einsum("sbhd,tbhd->bhst", query_layer, key) * self.scale
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        probabilities = scores.masked_fill(future, float("-inf")).softmax(-1)
        return torch.einsum("bhst,tbhd->sbhd", probabilities, value).flatten(-2)
