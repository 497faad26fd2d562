#!/usr/bin/env bash
# A Llama small enough for any CPU, trained from random weights on made-up data: 20 steps in well under a minute.
#
#   train_llama_cpu_demo.sh [flags of pretrain_gpt.py]
#
# For instance --quant-type mxfp4, or --save-tensors --control-iter 1. Nothing is downloaded; nothing is written unless
# a flag says so. PROCESSES=2 with --tensor-model-parallel-size 2 runs it tensor-parallel.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

model_flags=(
    --num-layers 4
    --hidden-size 256
    --ffn-hidden-size 512
    --num-attention-heads 8
    --group-query-attention
    --num-query-groups 4
    --vocab-size 1024
    --seq-length 128
    --max-position-embeddings 128
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0
    --hidden-dropout 0
)
training_flags=(
    --micro-batch-size 2
    --global-batch-size 4
    --train-iters 20
    --lr 3e-4
    --lr-decay-style constant
    --mock-data
    --tokenizer-type NullTokenizer
    --eval-iters 0
    --log-interval 1
)

[[ -z "${PROCESSES:-}" || "$PROCESSES" =~ ^[1-9][0-9]{0,3}$ ]] || {
    printf '%s: error: PROCESSES is %s; allowed: a whole number from 1\n' "$(basename "$0")" "$PROCESSES" >&2
    exit 2
}
launcher=()
if ((${PROCESSES:-1} > 1)); then
    launcher=(-m torch.distributed.run --standalone --nproc_per_node "$PROCESSES")
fi
python="$("$root/script/setup_env.sh")"
exec "$python" ${launcher[@]+"${launcher[@]}"} "$root/pretrain_gpt.py" "${model_flags[@]}" "${training_flags[@]}" "$@"
