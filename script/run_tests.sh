#!/usr/bin/env bash
# Sets up the environment, then checks style, types, shell scripts and runs the tests; one summary at the end.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"

usage() {
    cat <<EOF
usage: script/run_tests.sh [--all] [pytest arguments]

Sets up the environment, then runs ruff, mypy, shellcheck and pytest, all of them even when one fails.

  --all     every test: what --slow and --matrix add to the rest
  --slow    also the tests that need the real model or minutes
  --matrix  also the tests that run a layout or a recipe among many
  --help    show this text

The rest goes to pytest: script/run_tests.sh tests/core -k linear -n 8
EOF
}

if [[ "${1:-}" == "-h" || "${1:-}" == "--help" ]]; then usage && exit; fi

if [[ "${1:-}" == "--all" ]]; then
    shift
    set -- --slow --matrix "$@"
fi

python="$(script/setup_env.sh --test)"
PATH="$(dirname "$python"):$PATH" # some checks are programs, not modules
export OMP_NUM_THREADS=1 # two workers share the cores; small tensors gain nothing from threads
mapfile -t shell_scripts < <(find . -path ./.venv -prune -o -path ./.git -prune -o -name '*.sh' -print | sort)

# The report's tests need a Chromium; where the distribution's can be had without asking anyone, it is installed.
install_chromium() {
    local browser why
    for browser in chromium chromium-browser google-chrome-stable google-chrome; do
        if command -v "$browser" >/dev/null; then return; fi
    done
    if [[ "$(id -u)" != 0 ]]; then why="this user is not root"
    elif ! command -v apt-get >/dev/null; then why="there is no apt-get"
    elif { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium; } \
        >/dev/null 2>&1; then return
    else why="apt-get could not install it"
    fi
    echo "run_tests: no Chromium, and $why: the tests in tests/browser are skipped" >&2
}

results=()
failed=0

# Runs one check, shows its output, and remembers how it went.
check() {
    local name="$1" began=$SECONDS result="ok"
    shift
    printf '\n== %s\n' "$name"
    "$@" || { result="FAILED" && failed=1; }
    results+=("$(printf '%-12s %-7s %4d s' "$name" "$result" $((SECONDS - began)))")
}

install_chromium
check "ruff check" "$python" -m ruff check .
check "ruff format" "$python" -m ruff format --check .
check "mypy" "$python" -m mypy
check "shellcheck" shellcheck "${shell_scripts[@]}" .ci/run
# One file goes to one worker, so that what a file makes once (a model, a capture) is made once.
check "pytest" "$python" -m pytest -n 2 --dist loadfile "$@"

printf '\n== summary\n'
printf '%s\n' "${results[@]}"
exit "$failed"
