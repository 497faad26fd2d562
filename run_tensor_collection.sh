#!/usr/bin/env bash
# Train with quantised GEMMs and keep the tensors that went in and came out: ./run_tensor_collection.sh --help
# Works from any directory; script/driver/collection.py does the work, and sets up the environment when it is needed.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
python="$("$root/script/setup_env.sh" --interpreter)"
exec "$python" -m script.driver.collection "$@"
