#!/usr/bin/env bash
# Agents that learn in context, from nothing to a picture, in one command: makes the
# data, trains every agent with every seed, lets them act in worlds that were held out,
# and draws it. What is there already is not made again, so a run that was cut goes on.
#
# Usage: [OUT=folder] [PYTHON=python] bash tools/in_context.sh WHERE AGENTS SEEDS [FLAG ...]
#        bash tools/in_context.sh 9x9 dpt,ad,at,dt,bc 0,1,2
#        OUT=runs/small bash tools/in_context.sh 9x9 dpt 0 --config.train.steps=200
#
# WHERE is a room, 10x10 or 9x9. OUT (runs/in_context/WHERE) gets a working
# directory and AGENT_SEED.json for each agent and seed, and returns.png. Explorers of
# rooms read episodes of drawn actions too, on a ring of 8: AGENT_SEED_read.json. FLAGs go
# to training and evaluation, and are the same for all that is in OUT.
set -euo pipefail
# Those of the caller's folder stay so.
[ -z "${OUT:-}" ] || OUT=$(realpath -m -- "$OUT")
[[ ${PYTHON:=python} != */* ]] || PYTHON=$(realpath -ms -- "$PYTHON")
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."

[ $# -ge 3 ] || { sed -n 's/^# Usage: //p' "$0" >&2 && exit 1; }
WHERE=$1
read -ra agents <<<"${2//,/ }"
read -ra seeds <<<"${3//,/ }"
shift 3
OUT=${OUT:-runs/in_context/$WHERE}

# Make the data of an agent, if there are none; of two at once, one makes them.
data() {
    exec 9<tools/in_context.sh
    ! command -v flock >/dev/null || flock 9
    make_data "$1"
    exec 9<&-
}

make_data() {
    local kind=learning
    [ "$1" != dpt ] || kind=exploration
    local made=trajectories/dark_room/$WHERE/$kind
    [ -e "$made" ] || "$PYTHON" -m tools.make_dark_room \
        --room "$WHERE" --recorded "$kind" --output "$made"
}

# Rows and episodes, and those that are read before one. How to draw in rooms was chosen
# on goals that were trained on: to imitate in 9x9, to explore in 10x10. AD reads
# no more episodes than it was trained with.
imitate=(--temperature 0.7) explore=(--temperature 2 --hold 5) distil=()
case $WHERE in
10x10) config=icrl.py:dark_room/10x10/ play=(100 10) read=(1 2 4 8 16) ;;
9x9) config=icrl.py:dark_room/9x9/ play=(48 40) read=(4 16 64 250 1000)
    distil=(--window 20) ;;
*) echo "error: $WHERE is neither 10x10 nor 9x9" >&2 && exit 1 ;;
esac

# Let an agent act: FILE ROWS EPISODES [FLAG ...], if the file is not there.
act() {
    rows+=("$1")
    [ ! -e "$1" ] || { echo "$1 is there, and is kept" && return; }
    "$PYTHON" -m tools.evaluate exorl "${given[@]}" --output "$1" \
        --environments "$2" --episodes "$3" "${@:4}"
}

mkdir -p "$OUT"
[ -e "$OUT/flags" ] || printf '%s\n' "$*" >"$OUT/flags"
[ "$(cat "$OUT/flags")" = "$*" ] || {
    echo "error: what is in $OUT was made with the flags '$(cat "$OUT/flags")': give" \
        "these, or another OUT" >&2 && exit 1
}
rows=()
for seed in "${seeds[@]}"; do
    for agent in "${agents[@]}"; do
        data "$agent"
        run=$OUT/${agent}_$seed
        given=(--config="configs/$config$agent" --config.workdir="$run"
            --config.seed="$seed" "$@")
        [ -e "$run.json" ] || "$PYTHON" train.py "${given[@]}"
        if [ "$agent" != dpt ]; then
            how=("${imitate[@]}")
            [ "$agent" != ad ] || how+=("${distil[@]}")
            act "$run.json" "${play[@]}" "${how[@]}"
            continue
        fi
        act "$run.json" "${play[@]}" "${explore[@]}"
        act "${run}_read.json" "${play[0]}" 1 --contexts \
            --random "${read[@]}" \
            --config.simulated_devices=8 --config.mesh.data=1 --config.mesh.ring=8
    done
done
"$PYTHON" -m tools.figures returns "${rows[@]}" --output "$OUT/returns.png"
