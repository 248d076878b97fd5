#!/usr/bin/env bash
# Build wheel and sdist of the library, and test them in empty environments.
# Usage: test_range.sh [PYTHON JAX]...
# PYTHON: a command, as python3.11. JAX: what pip installs, as jax==0.10.2 or jax.
# The default is the oldest of both, then the newest. In each environment: the wheel,
# the ring's program of README and the training step of docs/use_the_ring.md away from
# the source, then the library's own tests: FILES, without the kernels of a chip, which
# have one jax.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

[ $# -gt 0 ] || set -- python3.11 jax==0.10.2 python3.13 jax
FILES=(attention batches checks decode_attention delta layout_choice layouts masks
    merge reference ring ring_checks ring_transfers routes tile_ranges trees ulysses
    unions)
files=("${FILES[@]/#/tests/kernels/test_}")
files=("${files[@]/%/.py}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

environment() { # name, python, packages: an environment with these alone
    "$2" -m venv "$folder/$1"
    "$folder/$1/bin/python" -m pip install -q --disable-pip-version-check "${@:3}"
}

program() { # page, heading, file: the program in Python below that heading
    awk -v heading="## $2" '!inside && /^#/ {below = $0 == heading} /^```$/ {inside = 0}
        below && inside {print} /^```python$/ {inside = 1}' "$1" >"$3"
    [ -s "$3" ] || { echo "$1 must have a program below '$2'" >&2 && exit 1; }
}

environment build python3.12 build
git archive HEAD | tar x -C "$folder" --one-top-level=source
# The wheel is made from the sdist, which must be complete for that.
"$folder/build/bin/python" -m build -q --outdir "$folder/dist" "$folder/source"
ls "$folder/dist"
mkdir "$folder/empty"
program README.md "The ring in your own program" "$folder/empty/readme.py"
program docs/use_the_ring.md "A training step" "$folder/empty/step.py"
while [ $# -gt 0 ]; do
    name=${1##*/}-$2
    environment "$name" "$1" "$2" "$folder"/dist/*.whl
    python=$folder/$name/bin/python
    (cd "$folder/empty" && time JAX_PLATFORMS=cpu "$python" -I readme.py)
    "$python" -m pip install -q "$2" flax optax pytest pytest-timeout
    (cd "$folder/empty" && time JAX_PLATFORMS=cpu "$python" -I step.py)
    "$python" --version
    "$python" -m pip list 2>/dev/null | grep -E '^(annulus|jax|flax|numpy)'
    OPENBLAS_NUM_THREADS=1 JAX_PLATFORMS=cpu "$python" -m pytest -q \
        -p no:cacheprovider -m "not slow and (quick or not thorough)" \
        -k "not (pallas_tpu or hopper or triton or tokamax)" \
        "${files[@]}" ${ARGS:-}
    shift 2
done
