#!/usr/bin/env bash
# Fine-tune a pretrained Llama-type model with quantised GEMMs.
#
#   finetune_pretrained_demo.sh [MODEL] [TEXT] [flags of pretrain_gpt.py]
#
#   MODEL  a .gguf file or a Hugging Face directory with safetensors    (SmolLM2-135M, fetched once)
#   TEXT   a .txt, .jsonl or Wikipedia .xml[.bz2] file                  (106 Wikipedia articles, fetched once)
#
# A given model is imported to checkpoints/NAME, a given text turned into tokens beside it, both once. Then five steps
# of two sequences of 256 tokens run in bf16 with MXFP8 operands: a minute or so on two cores with the default model.
# Compare its losses with those of --quant-type none, mxfp4 or hifp8, which start from the same weights and data.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

words=()
while (($#)) && ((${#words[@]} < 2)) && [[ "$1" != -* ]]; do
    [[ -e "$1" ]] || { printf '%s: error: %s does not exist\n' "$(basename "$0")" "$1" >&2 && exit 2; }
    words+=("$1")
    shift
done
model="${words[0]:-}"
text="${words[1]:-}"
python="$("$root/script/setup_env.sh")"

# The name of a file or directory without its directory and last suffix.
stem() {
    local name
    name="$(basename "$1")"
    echo "${name%.*}"
}

if [[ -z "$model" || -z "$text" ]]; then
    mapfile -t defaults < <("$python" -c 'from script.data.default import ensure_default_assets
import sys
assets = ensure_default_assets(lambda line: print(line, file=sys.stderr))
print(assets.checkpoint, assets.data_prefix, assets.text, sep="\n")')
    ((${#defaults[@]} == 3)) || exit 1 # the reason was printed
fi

checkpoint="${defaults[0]:-}"
data="${defaults[1]:-}"
if [[ -n "$model" ]]; then
    checkpoint="checkpoints/$(stem "$model")"
    [[ -e "$checkpoint" ]] || "$python" -m script.model.import_checkpoint "$model" --output "$checkpoint"
    text="${text:-${defaults[2]}}" # another model's tokens are other numbers
fi
if [[ -n "$text" ]]; then
    data="$checkpoint/tokens/$(stem "$text")"
    [[ -n "$model" ]] || data="checkpoints/tokens/$(stem "$text")"
    [[ -e "$data.idx" ]] || "$python" -m script.data.prepare_corpus "$text" --tokenizer "$checkpoint" --output "$data"
fi

exec "$python" "$root/pretrain_gpt.py" \
    --load "$checkpoint" --use-checkpoint-args --finetune --no-load-optim --no-load-rng \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$checkpoint" \
    --data-path "$data" --split 100,0,0 --seq-length 256 \
    --bf16 --micro-batch-size 1 --global-batch-size 2 --train-iters 5 --lr 1e-4 --lr-decay-style constant \
    --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --log-interval 1 --quant-type mxfp8 "$@"
