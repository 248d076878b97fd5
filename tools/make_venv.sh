#!/usr/bin/env bash
# Make VENV a CPython 3.12 environment with the packages of all REQUIREMENTS files.
# Usage: make_venv.sh VENV REQUIREMENTS...
#
# VENV/installed/ holds the digest of every file installed, written after pip is done:
# unchanged files cost one start of Python, an interrupted install is done again.
set -euo pipefail

fail() {
    printf 'make_venv: %s\n' "$1" >&2
    exit 1
}

# Print the path and version of interpreter $1, or fail if it is not CPython 3.12. Asked
# of the interpreter itself: a pyenv shim can bear the right name and still not run.
identify() {
    "$1" -I -c 'import sys
if sys.version_info[:2] != (3, 12) or sys.implementation.name != "cpython":
    sys.exit(1)
print("%s (%d.%d.%d)" % ((sys.executable,) + sys.version_info[:3]))' \
        </dev/null 2>/dev/null
}

candidates() {
    type -aP python3.12 python3 python || true
    printf '%s\n' "${PYENV_ROOT:-${HOME-}/.pyenv}"/versions/3.12*/bin/python
}

# Set `python` to the first candidate that can make an environment, or fail.
find_python() {
    local candidate without_ensurepip=""
    while IFS= read -r candidate; do
        # An active VENV stands on the PATH, and is about to be removed.
        [ "$(dirname "$candidate")" -ef "$venv/bin" ] && continue
        identify "$candidate" >/dev/null || continue
        if "$candidate" -I -c 'import ensurepip' </dev/null 2>/dev/null; then
            python=$candidate
            return
        fi
        without_ensurepip=$candidate
    done < <(candidates)
    if [ -n "$without_ensurepip" ]; then
        fail "Python 3.12 ($without_ensurepip) lacks ensurepip, which makes virtual\
 environments: apt install python3.12-venv"
    fi
    fail "Python 3.12 is missing, on the PATH and under pyenv: pyenv install 3.12, or\
 apt install python3.12 python3.12-venv"
}

is_usable() {
    [ ! -e "$venv/unfinished" ] && identify "$venv/bin/python" >/dev/null &&
        "$venv/bin/python" -I -c 'import pip' </dev/null 2>/dev/null
}

make_environment() {
    local output
    find_python
    if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ ! -e "$venv/unfinished" ]; then
        fail "$venv is no virtual environment: move it away, its place is needed"
    fi
    echo "making $venv with $(identify "$python")"
    rm -rf "$venv"
    mkdir -p "$venv"
    touch "$venv/unfinished"
    if ! output=$("$python" -m venv "$venv" 2>&1 </dev/null); then
        fail "$python -m venv $venv failed: $(tail -n 1 <<<"$output")"
    fi
    rm "$venv/unfinished"
}

# Print the REQUIREMENTS files that are not installed as they stand.
list_stale() {
    local file
    for file in "$@"; do
        cmp -s <(cksum <"$file") "$venv/installed/${file##*/}" || echo "$file"
    done
}

install() {
    local file name stale=$1
    shift
    echo "installing $stale (the first time takes minutes)"
    mkdir -p "$venv/installed"
    for file in "$@"; do
        name=${file##*/}
        rm -f "$venv/installed/$name"
        cksum <"$file" >"$venv/installed/$name.begun"
    done
    # -qq: errors only.
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
        "${@/#/--requirement=}" || fail "pip could not install $stale"
    for file in "$@"; do
        name=${file##*/}
        mv "$venv/installed/$name.begun" "$venv/installed/$name"
    done
}

[ $# -ge 2 ] || fail "usage: make_venv.sh VENV REQUIREMENTS..."
venv=$1
shift
for file in "$@"; do
    [ -f "$file" ] || fail "$file is missing"
done
# Two commands at once take turns, where the system has flock.
if command -v flock >/dev/null; then
    exec 9<"$(dirname "$venv")"
    flock 9 2>/dev/null || true
fi
if ! is_usable; then
    make_environment
fi
stale=$(list_stale "$@")
if [ -n "$stale" ]; then
    install "${stale//$'\n'/, }" "$@"
fi
