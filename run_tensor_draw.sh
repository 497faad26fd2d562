#!/usr/bin/env bash
# Draw the tensors of a capture, collecting them first if asked to: ./run_tensor_draw.sh --help
# Works from any directory; script/driver/draw.py does the work, and sets up the environment when it is needed.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
python="$("$root/script/setup_env.sh" --interpreter)"
exec "$python" -m script.driver.draw "$@"
