"""Flags of Megatron-LM that are not honoured here: told apart from mistyped ones, and answered with a reason.

`megatron_names.txt` has the name of every flag that Megatron-LM knows. It is read only when a flag is met that stands
in none of our tables. The topics below say why whole families of them can not work here; the first that matches rules.
"""

from __future__ import annotations

import re
from pathlib import Path

NAMES_FILE = Path(__file__).with_name("megatron_names.txt")

_REASONS: tuple[tuple[str, str], ...] = (
    (r"rl|grpo|langrl|refit", "there is no reinforcement learning here"),
    (
        r"inference|indexer|max-tokens-to-oom|.*-prefill|num-speculative-tokens|flash-decode|decode-only|use-legacy-static"
        r"|output-bert",
        "there is no text generation here",
    ),
    (r"save-(dgrads|wgrads|activations|params)-interval", "this is what --save-tensors is for"),
    (r"wandb|one-logger|app-tag|otel|langfuse", "only TensorBoard is supported (--tensorboard-dir)"),
    (
        r"bert|biencoder|ict|titles|evidence|retriever|dino|vision|img|patch|num-(channels|classes)|swin|mask|short-seq"
        r"|classes-fraction|sample-rate|head-lr-mult|relative-attention|use-one-sent|block-data|embedding-path"
        r"|query-in-block|report-topk|iter-per-epoch|data-per-class",
        "only GPT and Llama models are supported",
    ),
    (
        r"(is-)?hybrid(?!-context)|mamba|gdp|linear-(attention|conv|key|num|value)",
        "hybrid and state-space models are not supported",
    ),
    (
        r"multi-latent-attention|(q|kv)-lora|qk-head-dim|qk-pos-emb|v-head-dim|mla|mscale|cache-mla|dsa|experimental-att",
        "multi-latent attention is not supported; use --group-query-attention",
    ),
    (r"mtp", "multi-token prediction is not supported"),
    (r"moe|expert|ep-overlap", "of mixtures of experts, only what --help lists is supported"),
    (
        r".*fsdp|torch-fsdp2|outer-dp|data-parallel-sharding|init-model-with-meta",
        "fully sharded data parallelism is not supported; use --use-distributed-optimizer",
    ),
    (r".*cuda-graph.*", "CUDA graphs would replay what capture and the quantised GEMMs do in Python"),
    (
        r"(.*-)?(cpu-)?offload(ing)?(-.*)?|use-torch-optimizer-for-cpu|.*-offload-.*|overlap-cpu-optimizer",
        "nothing is offloaded to the host's memory",
    ),
    (r"tp-comm", "needs TransformerEngine's overlapping kernels, which are not supported"),
    (
        r"fp8|fp4|.*-fp8-.*|te-|kitchen|use-kitchen|keep-fp8|first-last-layers-bf16|num-layers-at",
        "of TransformerEngine's FP8 and FP4, only what --help lists is supported; quantised GEMMs are --quant-type",
    ),
    (
        r"muon|lion|mup|use-mup|qk-clip|optimizer-|use-precision-aware|main-(grads|params)-dtype|exp-avg",
        "only AdamW and SGD with state in float32 are supported (--optimizer)",
    ),
    (
        r"inprocess|ft-|enable-ft|calc-ft|(.*-)?straggler|adlr|fault-injector|error-injection|run-workload|gpu-sniff"
        r"|flight-recorder|iterations-to-skip|result-rejected|check-for-(large|spiky)",
        "there is no fault tolerance beyond --exit-on-missing-checkpoint and resuming from checkpoints",
    ),
    (r"use-flash-attn|flash-attention-version", "attention kernels are chosen by --attention-backend"),
    (
        r"use-legacy-models|no-position-embedding|checkpoint-activations|model-parallel-size|batch-size|warmup"
        r"|distribute-saved-activations|encoder-(num|seq)|decoder-(num|seq)|onnx",
        "Megatron-LM itself gave it up, or keeps it for models that are not trained here",
    ),
    (
        r"fim|sft|dataloader|per-dataset|multiple-validation|full-validation|object-storage|chat-template",
        "data are read by --data-path, --train-data-path or --mock-data, one sample after the other",
    ),
)


def refusal(flag: str) -> str | None:
    """What to answer to `flag` (with its dashes); None when Megatron-LM does not know it either."""
    if flag not in NAMES_FILE.read_text(encoding="utf-8").split("\n"):
        return None
    bare = flag.removeprefix("--")
    for pattern, reason in _REASONS:
        if re.match(rf"(?:no-|disable-)?(?:{pattern})(?:-|$)", bare):
            return f"{flag}: known to Megatron-LM, not supported here: {reason}"
    return f"{flag}: known to Megatron-LM, not supported here"
