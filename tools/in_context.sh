#!/usr/bin/env bash
# Agents that learn in context, from nothing to a picture, in one command: makes the
# data, trains every agent with every seed, lets them act in worlds that were held out,
# and draws it. What is there already is not made again, so a run that was cut goes on.
#
# Usage: [OUT=folder] [PYTHON=python] bash tools/in_context.sh WHERE AGENTS SEEDS [FLAG ...]
#        bash tools/in_context.sh 9x9 dpt,ad,at,dt,bc 0,1,2
#
# WHERE is 10x10 or 9x9, rooms, or cartpole. OUT (runs/in_context/WHERE) gets a working
# directory and AGENT_SEED.json for each agent and seed, and returns.png. FLAGs go to
# training and evaluation, to try it in a small size: --config.train.steps=200.
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."

[ $# -ge 3 ] || { sed -n 's/^# Usage: //p' "$0" >&2 && exit 1; }
WHERE=$1
read -ra agents <<<"${2//,/ }"
read -ra seeds <<<"${3//,/ }"
shift 3
OUT=${OUT:-runs/in_context/$WHERE}
PYTHON=${PYTHON:-python}

# Make the data of an agent, if there are none.
data() {
    if [ "$WHERE" = cartpole ]; then
        [ -e datasets/cartpole/worlds ] || "$PYTHON" -m tools.make_worlds \
            --worlds 200 --episodes 12 --action-repeat 10 --output datasets
        [ -e trajectories/cartpole/worlds/swingup ] || "$PYTHON" -m tools.pack_exorl \
            --root datasets --domain cartpole --algorithm worlds --task swingup \
            --action-repeat 10 --targets --cache trajectories
        return
    fi
    local kind=history
    [ "$1" = dpt ] && kind=exploration
    local made=trajectories/dark_room/$WHERE/$kind
    [ -e "$made" ] || "$PYTHON" -m tools.make_dark_room \
        --room "$WHERE" --recorded "$kind" --output "$made"
}

# Rows and episodes.
case $WHERE in
10x10) config=icrl_dark_room.py:10x10/ play=(100 10) ;;
9x9) config=icrl_dark_room.py:9x9/ play=(16 40) ;;
cartpole) config=icrl_cartpole.py: play=(40 6) ;;
*) echo "error: $WHERE is none of 10x10, 9x9, cartpole" >&2 && exit 1 ;;
esac

mkdir -p "$OUT"
rows=()
for seed in "${seeds[@]}"; do
    for agent in "${agents[@]}"; do
        data "$agent"
        run=$OUT/${agent}_$seed
        given=(--config="configs/$config$agent" --config.workdir="$run"
            --config.seed="$seed" "$@")
        rows+=("$run.json")
        [ -e "$run.json" ] && continue
        "$PYTHON" train.py "${given[@]}"
        # Explores best of those tried, in both rooms' worlds that were trained on.
        temperature=1
        [ "$agent" = dpt ] && [ "$WHERE" != cartpole ] && temperature=2
        "$PYTHON" -m tools.evaluate exorl "${given[@]}" --environments "${play[0]}" \
            --episodes "${play[1]}" --temperature "$temperature" --output "$run.json"
    done
done
"$PYTHON" -m tools.figures worlds "${rows[@]}" --output "$OUT/returns.png"
