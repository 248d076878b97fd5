#!/usr/bin/env bash
# Starts a run on every worker of a Cloud TPU VM slice, and leaves it running there.
#
#   TPU=my-v4 ZONE=us-central2-b tools/launch/tpu_vm.sh configs/tpuv4_7b.py \
#     --config.workdir=gs://BUCKET/RUN --config.data.corpus=CORPUS
#
# The workers find each other. The same command resumes. A run that was preempted (75),
# hung (70) or lost another worker (134, JAX aborts it) is started again; after any other
# end it stays down. The log is ~/annulus/run.log.
set -euo pipefail
: "${TPU:?name of the TPU VM}" "${ZONE:?its zone}"
config=${1:?a file in configs/}
shift
flags=$(printf ' %q' "--config=$config" "$@")

on_all_workers() {
  gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$1"
}

gcloud compute tpus tpu-vm scp --recurse --worker=all --zone="$ZONE" \
  . "$TPU:~/annulus"
on_all_workers "cd ~/annulus && make venv ACCELERATOR=tpu"
# tmux outlives the connection.
on_all_workers "cd ~/annulus && tmux new-session -d -s annulus \
  'until .venv/bin/python train.py$flags >>run.log 2>&1 ||
    ! grep -qw \$? <<<\"70 75 134\"; do :; done'"
