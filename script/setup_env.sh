#!/usr/bin/env bash
# Finds or makes the Python environment of this checkout and prints the path of its interpreter (stdout, one line).
#
# In this order:
#   1. the active environment (venv, conda), if it holds what requirements/ asks for;
#   2. .venv in the checkout, once set up here (a copy of the requirement files inside it says so);
#   3. the python3 on the PATH, if it holds what is needed (a container image, for instance);
#   4. a new .venv, filled by pip with the versions of requirements/constraints.txt. Only this step uses the network.
# Safe to call at any time and from several processes at once: step 4 is done under a lock.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
requirements="$root/requirements"
venv="${QUANTSCOPE_VENV:-$root/.venv}"
venv_python="$venv/bin/python"
log="$venv/.quantscope-install.log"
oldest=10
newest=13 # the newest 3.x for which constraints.txt was checked
files=("$requirements/runtime.txt")
stamp="$venv/.quantscope-runtime"

usage() {
    cat <<EOF
usage: script/setup_env.sh [--test] [--interpreter]

Sets up the Python environment and prints the path of its interpreter.

  --test         with what script/run_tests.sh needs
  --interpreter  print any Python >= 3.$oldest, set up nothing
  --help         show this text

QUANTSCOPE_VENV      where to make the environment (default: .venv in the checkout)
QUANTSCOPE_PIP_ARGS  further options for pip install, for instance an index that holds the torch build to use
EOF
}

say() { printf 'setup_env: %s\n' "$*" >&2; }

fail() {
    say "$1"
    exit "${2:-1}"
}

# The real path of a command's interpreter if it runs and is 3.$oldest..3.$2. A pyenv shim may exist and not run.
interpreter_path() {
    "$1" -IS -c "import sys
v = sys.version_info
if not (v[0] == 3 and $oldest <= v[1] <= $2): sys.exit(1)
print(sys.executable)" 2>/dev/null
}

any_python() {
    local newest_allowed="$1" command
    for command in python3 python python3.13 python3.12 python3.11 python3.10; do
        if command -v "$command" >/dev/null && interpreter_path "$command" "$newest_allowed"; then return; fi
    done
    return 1
}

# What an interpreter lacks, on one line; status 0 when it lacks nothing.
lacks() {
    local missing
    missing="$("$1" "$requirements/check.py" "${files[@]}" 2>&1)" && return
    echo "$missing" | awk 'NR <= 3 { text = text (NR > 1 ? ", " : "") $0 } END { print text (NR > 3 ? " and " NR - 3 " more" : "") }'
    return 1
}

is_stamped() { [[ -x "$venv_python" && -f "$stamp" ]] && cmp -s "$stamp" <(wanted); }

wanted() { cat "$requirements/constraints.txt" "${files[@]}"; }

# pip's progress: the newest line on a terminal, nothing elsewhere; everything goes to the log.
show_progress() {
    local line
    if [[ ! -t 2 ]]; then cat >/dev/null; return; fi
    while IFS= read -r line; do printf '\r\033[K%.100s' "$line" >&2; done
    printf '\r\033[K' >&2
}

# Why pip failed, from its log. Out of reach of an index, it goes on to report conflicts that are none.
pip_failure() {
    if grep -q 'after connection broken' "$log"; then
        echo "no connection to the package index (network, proxy or pip's configuration)"
    else
        grep -E '^ERROR' "$log" | head -1 | cut -c 1-200
    fi
}

make_environment() {
    local base="$1"
    if [[ -x "$venv_python" ]] && "$venv_python" -c '' 2>/dev/null; then return; fi
    "$base" -c 'import venv, ensurepip' 2>/dev/null || fail "$base cannot make an environment: its venv module is \
missing. Install it (Debian and Ubuntu: the package python3-venv), or activate an environment that has what \
requirements/runtime.txt lists"
    # --clear only ever meets a directory without a working interpreter.
    "$base" -m venv --clear "$venv" >&2 || fail "could not make the environment $venv"
}

install_packages() {
    local arguments=() extra=() file
    for file in "${files[@]}"; do arguments+=(-r "$file"); done
    read -ra extra <<<"${QUANTSCOPE_PIP_ARGS:-}"
    say "installing the packages into $venv (once; takes minutes where torch comes with CUDA)"
    rm -f "$stamp"
    if ! PIP_RETRIES="${PIP_RETRIES:-2}" "$venv_python" -m pip install --no-input --disable-pip-version-check \
        --progress-bar off "${arguments[@]}" -c "$requirements/constraints.txt" ${extra[@]+"${extra[@]}"} 2>&1 |
        tee "$log" | show_progress; then
        fail "could not install the packages: $(pip_failure). The whole log: $log"
    fi
    wanted >"$stamp.new" && mv "$stamp.new" "$stamp"
}

build() {
    local base
    base="$(any_python "$newest")" || fail "no Python 3.$oldest to 3.$newest found on the PATH. Install one, or \
activate an environment that has it"
    exec 9<"$requirements/constraints.txt" # a lock needs no file of its own
    if command -v flock >/dev/null && ! flock -n 9; then
        say "another process is setting up; waiting for it"
        flock 9
    fi
    is_stamped && return
    mkdir -p "$(dirname "$venv")" 2>/dev/null && [[ -w "$(dirname "$venv")" ]] || fail "cannot write to \
$(dirname "$venv"). Set QUANTSCOPE_VENV to a directory that can be written"
    make_environment "$base"
    install_packages
}

main() {
    local active missing="" want_interpreter=""
    while (($#)); do
        case "$1" in
            --test) files+=("$requirements/test.txt") stamp="$venv/.quantscope-test" ;;
            --interpreter) want_interpreter=1 ;;
            -h | --help) usage && return ;;
            *) fail "unknown option $1; allowed: --test, --interpreter, --help" 2 ;;
        esac
        shift
    done
    if [[ -n "$want_interpreter" ]]; then
        if [[ -x "$venv_python" && -f "$stamp" ]]; then echo "$venv_python" && return; fi
        any_python 99 || fail "no Python >= 3.$oldest found on the PATH. Install one, or activate an environment that has it"
        return
    fi

    active="$(any_python 99)" || active=""
    if [[ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" && "${VIRTUAL_ENV:-}" != "$venv" && -n "$active" ]]; then
        missing="$(lacks "$active")" && { echo "$active" && return; }
    fi
    if is_stamped; then echo "$venv_python" && return; fi
    if [[ -z "$missing" && -n "$active" && "${VIRTUAL_ENV:-}" != "$venv" ]]; then
        missing="$(lacks "$active")" && { echo "$active" && return; }
    fi
    [[ -z "$missing" || -x "$venv_python" ]] || say "$active lacks $missing"
    build
    echo "$venv_python"
}

main "$@"
