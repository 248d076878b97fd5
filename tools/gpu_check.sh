#!/usr/bin/env bash
# Everything that needs one NVIDIA GPU, in one call of about ten minutes: the tests that
# run the GPU kernels on the device (rings of all covering cases, and the door, in each
# type; the other tests of these kernels interpret or only compile them), the benchmark
# of kernels beside their peers, the steps of a ring on one GPU, and short training runs.
# What fails does not stop what follows; the exit status says whether all went well.
#
# Usage: [OUT=folder] [WHEELS=folder] [PYTHON=python] bash tools/gpu_check.sh [rehearsal]
#
# OUT gets tests.txt, log.txt, kernels.json, sizes.json, gist.json, ring.json and
# train.json: copy the JSON files into results/, under the name of the GPU, and draw them
# with `python -m tools.figures rates`.
# WHEELS holds packages to be installed first, without a network.
# "rehearsal" runs all of it in tiny sizes on a CPU, to try the script itself.
set -uo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."

OUT=${OUT:-runs/gpu_check}
PYTHON=${PYTHON:-python}
mkdir -p "$OUT"
exec > >(tee "$OUT/log.txt") 2>&1
# The benchmarks share the GPU with PyTorch and with programs they start.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
failed=()

# Run command $3... as step $1 for at most $2 seconds, and note if it fails.
step() {
    local name=$1 seconds=$2
    shift 2
    printf '\n== %s (%s)\n' "$name" "$(date -u +%H:%M:%S)"
    timeout "$seconds" "$@" || failed+=("$name: status $?")
}

if [ "${1-}" = rehearsal ]; then
    export JAX_PLATFORMS=cpu
    platform=cpu
    tests=(-k "refused or not_implemented" -n 0)
    kernels=(--lengths 64 128 --head-dims 16 --heads 2 --kv-heads 2 --repeats 1
        --calls 1 --contestants blockwise reference cudnn)
    sizes=("${kernels[@]}" --dtypes bfloat16 float16 --masks full)
    gist=("${kernels[@]}" --lengths 109 --masks full)
    ring=(--implementation blockwise --ring-size 2 --local-tokens 128 --heads 1
        --kv-heads 1 --head-dim 16 --repeats 1 --calls 1)
    train=(--config configs/tiny.py --contexts 64 128 --steps 3)
else
    platform=cuda
    tests=(-n 6 -k "not pallas_tpu")
    kernels=(--lengths 8192 16384 32768 --contestants hopper hopper_deterministic triton
        cudnn jax_mosaic_gpu tokamax torch_flash torch_cudnn)
    sizes=(--lengths 16384 --head-dims 64 128 256 --masks causal full
        --dtypes bfloat16 float16 --repeats 3
        --contestants hopper triton cudnn jax_mosaic_gpu torch_flash)
    gist=(--lengths 108540 --masks full --contestants hopper cudnn torch_flash
        --repeats 2 --calls 1)
    ring=(--ring-size 8 --local-tokens 2048)
    train=(--config configs/h200_1b.py --contexts 32768 131072 --steps 5)
fi

if [ -n "${WHEELS-}" ]; then
    # Whatever else these packages want is on the machine.
    step wheels 120 "$PYTHON" -m pip install -q --no-index --no-deps "$WHEELS"/*.whl
fi
step versions 60 "$PYTHON" -c 'import jax, sys
print(sys.version.split()[0], "jax", jax.__version__, jax.devices())'
step kernels 150 "$PYTHON" -m tools.bench_kernels "${kernels[@]}" \
    --output "$OUT/kernels.json"
JAX_PLATFORMS=$platform step tests 180 "$PYTHON" -m pytest -q -p no:cacheprovider \
    "${tests[@]}" tests/kernels/test_gpu_ring.py tests/kernels/test_attention.py > >(tee "$OUT/tests.txt")
step ring 90 "$PYTHON" -m tools.simulate_ring "${ring[@]}" --output "$OUT/ring.json"
step train 200 "$PYTHON" -m tools.bench_train "${train[@]}" --output "$OUT/train.json"
step gist 60 "$PYTHON" -m tools.bench_kernels "${gist[@]}" --output "$OUT/gist.json"
step sizes 90 "$PYTHON" -m tools.bench_kernels "${sizes[@]}" --output "$OUT/sizes.json"

printf '\n== done (%s)\n' "$(date -u +%H:%M:%S)"
printf '%s\n' "${failed[@]/#/FAILED }"
exit ${#failed[@]}
