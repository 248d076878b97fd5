#!/usr/bin/env bash
# Everything that needs one accelerator, in one call of about twelve minutes: tests that run
# the kernels on the device (the others interpret or only compile them), the benchmark
# of kernels beside their peers, the steps of a ring on one device, and short training
# runs. What fails does not stop what follows; the exit status says whether all went well.
#
# Usage: [OUT=folder] [WHEELS=folder] [PYTHON=python] bash tools/gpu_check.sh [rehearsal]
#        [OUT=folder] [WHEELS=folder] [PYTHON=python] bash tools/tpu_check.sh [rehearsal]
#
# OUT gets tests.txt, log.txt, kernels.json, sizes.json, gist.json, ring.json, and of rings
# over all chips of the host rings.json on TPUs, and where there are several GPUs a file
# for each way to move shards (GPU_TRANSFERS); and train_CONTEXT/metrics.jsonl, with
# seconds, MFU and memory of each step. Copy them into results/, under the name of the device.
# WHEELS holds packages to be installed first, without a network.
# "rehearsal" runs all of it in tiny sizes on a CPU, to try the script itself.
set -uo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."

device=$1 # gpu or tpu
OUT=${OUT:-runs/${device}_check}
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
    # Interrupted, it keeps what it has found so far.
    timeout -s INT -k 20 "$seconds" "$@" || failed+=("$name: status $?")
}

# A TPU belongs to one process at a time.
tests=(-n 0 -k pallas_tpu tests/kernels/test_attention.py)
case ${2-}$device in
rehearsal*)
    platform=cpu
    tests=(-k "refused or not_implemented" -n 0 tests/kernels/test_attention.py)
    kernels=(--lengths 64 128 --head-dims 16 --heads 2 --kv-heads 2 --repeats 1
        --calls 1 --contestants blockwise reference cudnn splash)
    sizes=("${kernels[@]}" --dtypes bfloat16 float16 --masks full)
    gist=("${kernels[@]}" --lengths 109 --masks full)
    ring=(--implementations blockwise --devices 2 --length 256 --heads 1
        --kv-heads 1 --head-dim 16 --repeats 1 --calls 1)
    rings=(--devices 2 --length 64 --heads 1 --kv-heads 1 --repeats 1)
    modes=(nccl)
    contexts=(64 128)
    train=(--config=configs/tiny.py --config.train.steps=3)
    ;;
gpu)
    platform=cuda
    tests=(-n 14 -k "(gpu_kernels or test_attention) and not pallas_tpu and not over_a_mesh"
        tests/kernels/test_ring.py tests/kernels/test_attention.py)
    kernels=(--lengths 8192 16384 32768 --repeats 3 --contestants hopper triton cudnn)
    sizes=(--lengths 16384 --head-dims 64 128 256 --masks causal full
        --dtypes bfloat16 float16 --repeats 3
        --contestants hopper triton cudnn)
    gist=(--lengths 108540 --masks full --contestants hopper cudnn
        --repeats 2 --calls 1)
    ring=(--devices 8 --length 131072 --heads 16 --kv-heads 16 --head-dim 128 --dtype bfloat16)
    rings=(--length 65536 --heads 16 --kv-heads 16 --head-dim 128 --dtype bfloat16
        --implementations hopper --layouts striped --repeats 3)
    modes=(nccl peer symmetric)
    contexts=(32768 131072)
    train=(--config=configs/h200_1b.py --config.train.steps=5)
    ;;
tpu)
    platform=tpu
    kernels=(--lengths 8192 16384 32768)
    sizes=(--lengths 16384 --head-dims 64 128 256 --masks causal full --repeats 3)
    gist=(--lengths 108544 --masks full --repeats 2 --calls 1)
    ring=(--devices 8 --length 16384 --heads 16 --kv-heads 16 --head-dim 128 --dtype bfloat16)
    rings=(--length 32768 --heads 16 --kv-heads 16 --head-dim 128 --dtype bfloat16
        --implementations pallas_tpu --repeats 3)
    # The layers of a 1B, few enough for 16 GB.
    contexts=(8192 32768)
    train=(--config=configs/h200_1b.py --config.model.num_layers=4
        --config.mesh.ring=-1 --config.train.steps=5)
    ;;
*)
    echo "error: device ${device} must be gpu or tpu" >&2
    exit 1
    ;;
esac
[ $platform != cpu ] || export JAX_PLATFORMS=cpu

if [ -n "${WHEELS-}" ]; then
    # Whatever else these packages want is on the machine.
    step wheels 120 "$PYTHON" -m pip install -q --no-index --no-deps "$WHEELS"/*.whl
fi
packages="grain jax matplotlib ml_collections optax orbax pytest xdist"
if ! said=$(JAX_PLATFORMS=$platform "$PYTHON" -c "import jax, sys, $(tr ' ' , <<<"$packages")
print(sys.version.split()[0], 'jax', jax.__version__, jax.devices())" 2>&1); then
    echo "error: $PYTHON cannot run this on $platform: $(tail -n 1 <<<"$said"):" \
        "make venv ACCELERATOR=\"$device dev\", and set PYTHON=.venv/bin/python"
    exit 1
fi
echo "$said"
step kernels 200 "$PYTHON" -m tools.bench_kernels "${kernels[@]}" \
    --output "$OUT/kernels.json"
JAX_PLATFORMS=$platform step tests 200 "$PYTHON" -m pytest -q -p no:cacheprovider "${tests[@]}" \
    > >(tee "$OUT/tests.txt")
step ring 90 "$PYTHON" -m tools.bench_ring --simulate "${ring[@]}" --output "$OUT/ring.json"
# A chip of TPU7x is two devices.
devices=$("$PYTHON" -c 'import jax; print(jax.device_count())')
if [ "$device" = tpu ]; then
    step rings 90 "$PYTHON" -m tools.bench_ring --devices "$devices" "${rings[@]}" \
        --output "$OUT/rings.json"
elif [ "$devices" -gt 1 ] || [ $platform = cpu ]; then
    # A mode that hangs or fails costs no other its rows.
    for mode in "${modes[@]}"; do
        step "rings_$mode" 90 "$PYTHON" -m tools.bench_ring --devices "$devices" \
            "${rings[@]}" --gpu-transfers "$mode" --output "$OUT/rings_$mode.json"
    done
fi
# One document, this project's Python end to end: attention reaches over the whole context.
"$PYTHON" - "$OUT/corpus" <<'END' || failed+=(corpus)
import sys
from pathlib import Path

from data.text.tokens.token_file import SPLITS, TokenFileWriter
from data.text.tokens.tokenizer import ByteTokenizer

text = "\n".join(path.read_text() for path in sorted(Path().glob("[a-z]*/**/*.py")))
with TokenFileWriter(Path(sys.argv[1]), ByteTokenizer()) as writer:
    for split in SPLITS:
        writer.write(split, ByteTokenizer().encode(text))
END
for context in "${contexts[@]}"; do
    # A step needs its memory in one piece.
    XLA_PYTHON_CLIENT_PREALLOCATE=true step "train_$context" 100 "$PYTHON" train.py "${train[@]}" \
        --config.workdir="$OUT/train_$context" --config.data.corpus="$OUT/corpus" \
        --config.data.context_tokens="$context" --config.optimizer.warmup_steps=1 \
        --config.train.log_every_steps=1 --config.train.validation_batches=0 \
        --config.checkpoint.save_every_steps=0
done
step gist 60 "$PYTHON" -m tools.bench_kernels "${gist[@]}" --output "$OUT/gist.json"
step sizes 90 "$PYTHON" -m tools.bench_kernels "${sizes[@]}" --output "$OUT/sizes.json"

printf '\n== done (%s)\n' "$(date -u +%H:%M:%S)"
printf '%s\n' "${failed[@]/#/FAILED }"
exit ${#failed[@]}
