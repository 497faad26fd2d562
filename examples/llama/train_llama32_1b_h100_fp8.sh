#!/usr/bin/env bash
# Pretrain Llama 3.2 1B.
#
#   train_llama32_1b_h100_fp8.sh [CHECKPOINTS] [TENSORBOARD] [TOKENIZER] [DATA] [DTYPE] [flags of pretrain_gpt.py]
#
#   CHECKPOINTS  directory to save to, and to continue from     (checkpoints/llama32_1b)
#   TENSORBOARD  directory of the scalars                       (tensorboard_logs/llama32_1b)
#   TOKENIZER    a tokenizer.json or its directory, or MOCK     (MOCK: no tokenizer, for mock data)
#   DATA         prefix of a .bin/.idx pair, or MOCK            (MOCK: made-up data)
#   DTYPE        bf16, fp16 or fp32                             (bf16)
#
# Further flags come last and override those below, for instance
#   --quant-type mxfp8 --save-tensors --control-iter 2      quantise the GEMMs, keep the tensors of two iterations
#   --num-layers 2 --seq-length 256 --global-batch-size 1   small enough for a CPU
#
# Environment: GPUS_PER_NODE (all of this machine's; 1 without GPU), NUM_NODES (1), NODE_RANK (0), MASTER_ADDR
# (localhost), MASTER_PORT (6000), TENSOR_PARALLEL (1), TRAIN_ITERS (1000).
# The name is Megatron-LM's: fp8 as DTYPE is TransformerEngine's, which the trainer does not support yet. Low-precision
# operands, FP8 among them, are what --quant-type is for.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

words=()
while (($#)) && ((${#words[@]} < 5)) && [[ "$1" != -* ]]; do
    words+=("$1")
    shift
done
checkpoints="${words[0]:-checkpoints/llama32_1b}"
tensorboard="${words[1]:-tensorboard_logs/llama32_1b}"
tokenizer="${words[2]:-MOCK}"
data="${words[3]:-MOCK}"
dtype="${words[4]:-bf16}"

fail() {
    printf '%s: error: %s\n' "$(basename "$0")" "$1" >&2
    exit 2
}

case "$dtype" in
    bf16) dtype_flags=(--bf16) ;;
    fp16) dtype_flags=(--fp16) ;;
    fp32) dtype_flags=() ;;
    fp8) fail "fp8 needs TransformerEngine, which the trainer does not support yet; allowed: bf16, fp16, fp32 (and \
--quant-type for the GEMM operands)" ;;
    *) fail "unknown dtype $dtype; allowed: bf16, fp16, fp32" ;;
esac

vocabulary=128256
if [[ "$tokenizer" == MOCK ]]; then
    [[ "$data" == MOCK ]] || fail "the data $data needs its tokenizer: give it as the third argument"
    tokenizer_flags=(--tokenizer-type NullTokenizer)
else
    [[ -e "$tokenizer" ]] || fail "the tokenizer $tokenizer does not exist; allowed: a tokenizer.json, its directory, MOCK"
    tokenizer_flags=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$tokenizer")
fi
if [[ "$data" == MOCK ]]; then
    data_flags=(--mock-data)
else
    [[ -e "$data.bin" && -e "$data.idx" ]] || fail "the data $data.bin and $data.idx do not both exist; allowed: the \
prefix of such a pair, MOCK"
    data_flags=(--data-path "$data" --split "99,1,0")
fi

gpus() {
    if command -v nvidia-smi >/dev/null; then nvidia-smi --list-gpus 2>/dev/null | wc -l; else echo 0; fi
}
processes="${GPUS_PER_NODE:-$(gpus)}"
((processes > 0)) || processes=1

launcher=(
    -m torch.distributed.run
    --nproc_per_node "$processes"
    --nnodes "${NUM_NODES:-1}"
    --node_rank "${NODE_RANK:-0}"
    --master_addr "${MASTER_ADDR:-localhost}"
    --master_port "${MASTER_PORT:-6000}"
)
model_flags=(
    --num-layers 16
    --hidden-size 2048
    --ffn-hidden-size 8192
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 64
    --vocab-size "$vocabulary"
    --seq-length 8192
    --max-position-embeddings 131072
    --position-embedding-type rope
    --rotary-base 500000
    --use-rope-scaling
    --rope-scaling-factor 32
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --swiglu
    --disable-bias-linear
    --attention-dropout 0
    --hidden-dropout 0
)
training_flags=(
    --micro-batch-size 1
    --global-batch-size 128
    --train-iters "${TRAIN_ITERS:-1000}"
    --lr 3e-4
    --min-lr 3e-5
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --eval-iters 0
    --log-interval 1
)
parallel_flags=(
    --tensor-model-parallel-size "${TENSOR_PARALLEL:-1}"
    --sequence-parallel
    --overlap-grad-reduce
)
output_flags=(
    --save "$checkpoints"
    --load "$checkpoints"
    --save-interval 500
    --tensorboard-dir "$tensorboard"
)

if ((processes == 1 && ${NUM_NODES:-1} == 1)); then launcher=(); fi # one process needs no torchrun

python="$("$root/script/setup_env.sh")"
exec "$python" ${launcher[@]+"${launcher[@]}"} "$root/pretrain_gpt.py" \
    "${model_flags[@]}" "${training_flags[@]}" "${dtype_flags[@]}" "${parallel_flags[@]}" \
    "${tokenizer_flags[@]}" "${data_flags[@]}" "${output_flags[@]}" "$@"
