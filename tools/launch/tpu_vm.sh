#!/usr/bin/env bash
# Starts a run on every worker of a Cloud TPU VM slice, and leaves it running there.
#
#   TPU=my-v5p ZONE=us-east5-a tools/launch/tpu_vm.sh configs/models.py:llama3_8b/v5p \
#     --config.workdir=gs://BUCKET/RUN --config.data.corpus=CORPUS
#
# On 64 v6e configs/models.py:llama3_8b/v6e, on 32 v5e configs/models.py:olmo3_7b/v5e_8k.
# It copies the files that git knows, and new ones that git does not ignore (about 4 MB),
# to ~/annulus of every worker: no runs, corpora or environments. The workers find each
# other. The same command resumes. A run that hung (70) or lost another worker (134, JAX
# aborts it) is started again; after any other end, a stop (75) among them, it stays
# down. The log is ~/annulus/run.log. See docs/many_hosts.md.
set -euo pipefail
: "${TPU:?name of the TPU VM}" "${ZONE:?its zone}"
: "${1:?a file in configs/}"
[[ $1 == --* ]] || set -- "--config=$1" "${@:2}"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

# A shell for each printf: this one's is the bash in tmux, the last line's that of ssh.
run="until .venv/bin/python train.py$(printf ' %q' "$@") \
  >>run.log 2>&1 || ! grep -qw \$? <<<'70 134'; do :; done"

on_all_workers() {
  gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all --command="$1"
}

source=$(mktemp -d)/annulus.tar.gz
git ls-files -z --cached --others --exclude-standard |
  while IFS= read -r -d '' file; do
    if [[ -e $file || -L $file ]]; then printf '%s\0' "$file"; fi  # git knows deleted ones
  done |
  tar --null --files-from=- -czf "$source"
gcloud compute tpus tpu-vm scp --worker=all --zone="$ZONE" "$source" "$TPU:"
# The images have Ubuntu 22.04 with Python 3.10; uv brings 3.12 to ~/.local/bin.
on_all_workers "mkdir -p annulus && tar -xzf annulus.tar.gz -C annulus && cd annulus &&
  export PATH=\$HOME/.local/bin:\$PATH &&
  { command -v python3.12 || { python3 -m pip install -q --user uv &&
    uv python install 3.12; }; } &&
  tools/make_venv.sh .venv requirements.txt requirements/tpu.txt"
# tmux outlives the connection.
on_all_workers "cd annulus && tmux new-session -d -s annulus bash -c $(printf %q "$run")"
