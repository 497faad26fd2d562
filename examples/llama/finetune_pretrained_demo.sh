#!/usr/bin/env bash
# Fine-tune a pretrained Llama-type model with quantised GEMMs.
#
#   finetune_pretrained_demo.sh [MODEL] [TEXT] [flags of pretrain_gpt.py]
#
#   MODEL  a .gguf file or a Hugging Face directory with safetensors    (SmolLM2-135M, fetched once)
#   TEXT   a .txt, .jsonl or Wikipedia .xml[.bz2] file                  (106 Wikipedia articles, fetched once)
#
# A given model is imported to checkpoints/NAME, a given text turned into tokens beside it, both once; a note beside
# each, NAME.source, says what it was made of, and another source of that name is refused. Then five steps
# of two sequences of 256 tokens run in bf16 with MXFP8 operands: a minute or so on two cores with the default model.
# Compare its losses with those of --quant-type none, mxfp4 or hifp8, which start from the same weights and data.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
fail() {
    printf '%s: error: %s\n' "$(basename "$0")" "$1" >&2
    exit 2
}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

words=()
while (($#)) && ((${#words[@]} < 2)) && [[ "$1" != -* ]]; do
    [[ -e "$1" ]] || fail "$1 does not exist"
    words+=("$1")
    shift
done
model="${words[0]:-}"
text="${words[1]:-}"

# The name of a file or directory without its directory and the suffixes of what it may be: Llama-3.2-1B stays whole.
stem() {
    local name suffix
    name="$(basename "$(realpath "$1")")"
    for suffix in .gguf .safetensors .bz2 .xml .txt .jsonl; do name="${name%"$suffix"}"; done
    echo "$name"
}

# Ends the script if $1 (or $1.idx) is there and the note beside it does not say that it was made of $2.
require_made_of() {
    local said
    [[ -e "$1" || -e "$1.idx" ]] || return 0
    said="$(cat "$1.source" 2>/dev/null || echo "nothing of its source")"
    [[ "$said" == "$(realpath "$2")" ]] || fail "$1 is there, and $1.source says $said, not $(realpath "$2"); remove \
both, or give $2 another name"
}
note_source() {
    mkdir -p "$(dirname "$1")"
    realpath "$2" >"$1.source"
}

checkpoint="checkpoints/${model:+$(stem "$model")}"
data="${checkpoint%/}/tokens/${text:+$(stem "$text")}"
if [[ -n "$model" ]]; then require_made_of "$checkpoint" "$model"; fi
if [[ -n "$text" ]]; then require_made_of "$data" "$text"; fi

python="$("$root/script/setup_env.sh")"
if [[ -z "$model" || -z "$text" ]]; then
    mapfile -t defaults < <("$python" -c 'from script.data.default import ensure_default_assets
import sys
assets = ensure_default_assets(lambda line: print(line, file=sys.stderr))
print(assets.checkpoint, assets.data_prefix, assets.text, sep="\n")')
    ((${#defaults[@]} == 3)) || exit 1 # the reason was printed
fi
if [[ -z "$model" ]]; then
    checkpoint="${defaults[0]}"
    [[ -n "$text" ]] || data="${defaults[1]}"
else
    if [[ -z "$text" ]]; then # another model's tokens are other numbers
        text="${defaults[2]}"
        data="$checkpoint/tokens/$(stem "$text")"
        require_made_of "$data" "$text"
    fi
    if [[ ! -e "$checkpoint" ]]; then
        note_source "$checkpoint" "$model"
        "$python" -m script.model.import_checkpoint "$model" --output "$checkpoint"
    fi
fi
if [[ -n "$text" && ! -e "$data.idx" ]]; then
    note_source "$data" "$text"
    "$python" -m script.data.prepare_corpus "$text" --tokenizer "$checkpoint" --output "$data"
fi

exec "$python" "$root/pretrain_gpt.py" \
    --load "$checkpoint" --use-checkpoint-args --finetune --no-load-optim --no-load-rng \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$checkpoint" \
    --data-path "$data" --split 100,0,0 --seq-length 256 \
    --bf16 --micro-batch-size 1 --global-batch-size 2 --train-iters 5 --lr 1e-4 --lr-decay-style constant \
    --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --log-interval 1 --quant-type mxfp8 "$@"
