#!/usr/bin/env bash
# Pretrain Llama 3.2 1B.
#
#   train_llama32_1b_h100_fp8.sh [CHECKPOINTS] [TENSORBOARD] [TOKENIZER] [DATA] [DTYPE] [flags of pretrain_gpt.py]
#
#   CHECKPOINTS  directory to save to, and to continue from     (checkpoints/llama32_1b)
#   TENSORBOARD  directory of the scalars and profiles          (tensorboard_logs/llama32_1b)
#   TOKENIZER    a tokenizer.json or its directory, or MOCK     (MOCK: no tokenizer, for mock data)
#   DATA         prefix of a .bin/.idx pair, or MOCK            (MOCK: made-up data)
#   DTYPE        bf16, fp16, fp32, or fp8                       (bf16)
#
# Flags come last and override those below: --quant-type mxfp8 --save-tensors --control-iter 2 quantises the GEMMs and
# keeps the tensors of two iterations. DTYPE fp8 is TransformerEngine's: its GEMMs, with the high-precision operands kept.
#
# The list of flags is that of Megatron-LM's Llama 3 8B example, in the sizes of 1B. Environment, with defaults:
#
#   model      NUM_LAYERS 16, HIDDEN_SIZE 2048, FFN_HIDDEN_SIZE 8192, NUM_ATTENTION_HEADS 32, NUM_QUERY_GROUPS 8,
#              KV_CHANNELS 64, VOCAB_SIZE 128256, SEQ_LENGTH 8192, MAX_POSITION_EMBEDDINGS 131072,
#              TIE_EMBEDDINGS 1 (0: an output head of its own), ATTENTION_BACKEND auto (fused with fp8)
#   length     TRAIN_SAMPLES 1953125000, LR_WARMUP_SAMPLES 1/500 and LR_DECAY_SAMPLES the rest of them; or TRAIN_ITERS,
#              with LR_WARMUP_ITERS and LR_DECAY_ITERS alike; EXIT_MINUTES 235 (save and stop after that long)
#   batch      MICRO_BATCH_SIZE 1, GLOBAL_BATCH_SIZE 128
#   rates      LR 3e-4, MIN_LR (a tenth of LR), DECOUPLED_LR and DECOUPLED_MIN_LR (of embedding and head: as the others)
#   world      GPUS_PER_NODE (all of this machine's; 1 without GPU), NUM_NODES 1, NODE_RANK 0, MASTER_ADDR localhost,
#              MASTER_PORT 6000, TENSOR_PARALLEL 1, PIPELINE_PARALLEL 1, CONTEXT_PARALLEL 1
#   data       DATA_CACHE_PATH benchmark_cache_llama32_1b, NUM_WORKERS (1; 0 without GPU)
#   reports    LOG_INTERVAL 1, EVAL_INTERVAL 100, EVAL_ITERS 32 (0: never), SAVE_INTERVAL 1000,
#              PROFILE (1 with a GPU: iterations 5 and 6, for nsys; 0 without)
#   DRY_RUN=1  prints the command instead of running it
#
# A few steps on a CPU:
#   NUM_LAYERS=2 HIDDEN_SIZE=64 FFN_HIDDEN_SIZE=128 NUM_ATTENTION_HEADS=4 NUM_QUERY_GROUPS=2 KV_CHANNELS=16 \
#   VOCAB_SIZE=1024 SEQ_LENGTH=64 GLOBAL_BATCH_SIZE=2 TRAIN_SAMPLES=6 EVAL_ITERS=1 train_llama32_1b_h100_fp8.sh
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"

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

# Values go into $(( )), which runs what it finds in brackets, so each is a number before it is used. An empty one
# counts as not set.
allow() {
    local pattern="$1" allowed="$2" name
    for name in "${@:3}"; do
        [[ -z "${!name:-}" || "${!name}" =~ ^($pattern)$ ]] || fail "$name is ${!name}; allowed: $allowed"
    done
}
allow "[1-9][0-9]{0,17}" "a whole number from 1" GPUS_PER_NODE NUM_NODES MASTER_PORT TENSOR_PARALLEL PIPELINE_PARALLEL \
    CONTEXT_PARALLEL NUM_LAYERS HIDDEN_SIZE FFN_HIDDEN_SIZE NUM_ATTENTION_HEADS NUM_QUERY_GROUPS KV_CHANNELS \
    VOCAB_SIZE SEQ_LENGTH MAX_POSITION_EMBEDDINGS TRAIN_ITERS TRAIN_SAMPLES LR_DECAY_ITERS LR_DECAY_SAMPLES \
    MICRO_BATCH_SIZE GLOBAL_BATCH_SIZE LOG_INTERVAL EVAL_INTERVAL SAVE_INTERVAL
allow "0|[1-9][0-9]{0,17}" "a whole number" NODE_RANK LR_WARMUP_ITERS LR_WARMUP_SAMPLES EVAL_ITERS NUM_WORKERS
allow "[0-9]+([.][0-9]*)?([eE][+-]?[0-9]+)?|[.][0-9]+([eE][+-]?[0-9]+)?" "a number" LR MIN_LR DECOUPLED_LR \
    DECOUPLED_MIN_LR EXIT_MINUTES
allow "[01]" "0 and 1" TIE_EMBEDDINGS PROFILE DRY_RUN

gpus="$(if command -v nvidia-smi >/dev/null; then nvidia-smi --list-gpus 2>/dev/null | wc -l; else echo 0; fi)"
processes="${GPUS_PER_NODE:-$((gpus > 0 ? gpus : 1))}"
nodes="${NUM_NODES:-1}"

case "$dtype" in
    bf16) dtype_flags=(--bf16 --grad-reduce-in-bf16) ;;
    fp16) dtype_flags=(--fp16) ;;
    fp32) dtype_flags=() ;;
    fp8)
        dtype_flags=(
            --bf16
            --grad-reduce-in-bf16
            --transformer-impl transformer_engine
            --fp8-format hybrid
            --fp8-amax-history-len 1024
            --fp8-amax-compute-algo max
            --fp8-param-gather
        )
        ;;
    *) fail "unknown dtype $dtype; allowed: bf16, fp16, fp32, fp8" ;;
esac

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
    data_flags=(--data-path "$data")
fi
data_flags+=(
    --split "99,1,0"
    --data-cache-path "${DATA_CACHE_PATH:-$PWD/benchmark_cache_llama32_1b}"
    --tiktoken-pattern v2
    --no-create-attention-mask-in-dataloader
    --no-mmap-bin-files
    --num-workers "${NUM_WORKERS:-$((gpus > 0 ? 1 : 0))}"
)

model_flags=(
    --use-mcore-models
    --num-layers "${NUM_LAYERS:-16}"
    --hidden-size "${HIDDEN_SIZE:-2048}"
    --ffn-hidden-size "${FFN_HIDDEN_SIZE:-8192}"
    --num-attention-heads "${NUM_ATTENTION_HEADS:-32}"
    --group-query-attention
    --num-query-groups "${NUM_QUERY_GROUPS:-8}"
    --kv-channels "${KV_CHANNELS:-64}"
    --vocab-size "${VOCAB_SIZE:-128256}"
    --seq-length "${SEQ_LENGTH:-8192}"
    --max-position-embeddings "${MAX_POSITION_EMBEDDINGS:-131072}"
    --position-embedding-type rope
    --rotary-base 500000
    --rotary-percent 1.0
    --use-rope-scaling
    --rope-scaling-factor 32
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --apply-layernorm-1p
    --swiglu
    --disable-bias-linear
    --init-method-std 0.0134
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --attention-backend "${ATTENTION_BACKEND:-$([[ "$dtype" == fp8 ]] && echo fused || echo auto)}"
)
if [[ "${TIE_EMBEDDINGS:-1}" == 0 ]]; then model_flags+=(--untie-embeddings-and-output-weights); fi

# Warm-up and decay of a run that is $1 long: shares of it as in the example.
warmup() { echo $(($1 / 500)); }
if [[ -n "${TRAIN_ITERS:-}" ]]; then
    rising="${LR_WARMUP_ITERS:-$(warmup "$TRAIN_ITERS")}"
    length_flags=(
        --train-iters "$TRAIN_ITERS"
        --lr-warmup-iters "$rising"
        --lr-decay-iters "${LR_DECAY_ITERS:-$((TRAIN_ITERS - rising))}"
    )
else
    samples="${TRAIN_SAMPLES:-1953125000}"
    rising="${LR_WARMUP_SAMPLES:-$(warmup "$samples")}"
    length_flags=(
        --train-samples "$samples"
        --lr-warmup-samples "$rising"
        --lr-decay-samples "${LR_DECAY_SAMPLES:-$((samples - rising))}"
    )
fi
lr="${LR:-3e-4}"
min_lr="${MIN_LR:-$(LC_ALL=C awk -v lr="$lr" 'BEGIN { print lr / 10 }')}"
training_flags=(
    --micro-batch-size "${MICRO_BATCH_SIZE:-1}"
    --global-batch-size "${GLOBAL_BATCH_SIZE:-128}"
    --lr "$lr"
    --min-lr "$min_lr"
    --decoupled-lr "${DECOUPLED_LR:-$lr}"
    --decoupled-min-lr "${DECOUPLED_MIN_LR:-$min_lr}"
    --lr-decay-style cosine
    --clip-grad 1.0
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --cross-entropy-loss-fusion
    --calculate-per-token-loss
    --manual-gc
    --empty-unused-memory-level 1
    --exit-duration-in-mins "${EXIT_MINUTES:-235}"
)
parallel_flags=(
    --tensor-model-parallel-size "${TENSOR_PARALLEL:-1}"
    --pipeline-model-parallel-size "${PIPELINE_PARALLEL:-1}"
    --context-parallel-size "${CONTEXT_PARALLEL:-1}"
    --sequence-parallel # of no matter with TENSOR_PARALLEL 1
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --distributed-timeout-minutes 60
)
output_flags=(
    --save "$checkpoints"
    --load "$checkpoints"
    --save-interval "${SAVE_INTERVAL:-1000}"
    --ckpt-format torch_dist
    --tensorboard-dir "$tensorboard"
    --log-interval "${LOG_INTERVAL:-1}"
    --log-throughput
    --eval-interval "${EVAL_INTERVAL:-100}"
    --eval-iters "${EVAL_ITERS:-32}"
)
if ((${PROFILE:-$((gpus > 0))})); then output_flags+=(--profile --profile-step-start 4 --profile-step-end 6); fi

launcher=()
if ((processes > 1 || nodes > 1)); then # one process needs no torchrun
    launcher=(
        -m torch.distributed.run
        --nproc_per_node "$processes"
        --nnodes "$nodes"
        --node_rank "${NODE_RANK:-0}"
        --master_addr "${MASTER_ADDR:-localhost}"
        --master_port "${MASTER_PORT:-6000}"
    )
fi

python="$("$root/script/setup_env.sh")"
if [[ "$dtype" == fp8 ]] && ! "$python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("transformer_engine"))'
then
    fail "fp8 needs the package transformer-engine, which is not installed; allowed without it: bf16, fp16, fp32 (and \
--quant-type for the GEMM operands)"
fi
command=("$python" ${launcher[@]+"${launcher[@]}"} "$root/pretrain_gpt.py" "${model_flags[@]}" "${length_flags[@]}"
    "${training_flags[@]}" ${dtype_flags[@]+"${dtype_flags[@]}"} "${parallel_flags[@]}" "${tokenizer_flags[@]}"
    "${data_flags[@]}" "${output_flags[@]}" "$@")
if [[ "${DRY_RUN:-0}" == 1 ]]; then
    printf '%q ' "${command[@]}" && echo
    exit
fi
exec "${command[@]}"
