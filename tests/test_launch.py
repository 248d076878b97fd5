"""What launch files run, with stand-ins that execute what they are given.

Nothing is installed: the Python of a worker writes down its arguments.
"""

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

SCRIPT = "tools/launch/tpu_vm.sh"
ROOT = Path(__file__).resolve().parent.parent
# A worker's home is $WORKER: ssh hands its command to a shell, as does tmux one word.
GCLOUD = """case $4 in
    scp) cp "$7" "$WORKER" ;;
    ssh) cd "$WORKER" && HOME=$WORKER bash -c "${8#--command=}" ;;
esac"""
TMUX = """[ $# -gt 5 ] || exec bash -c "$5"
exec "${@:5}" """
# Hangs once, and loses another worker once.
PYTHON = r"""printf '%s\n' "$@" >>arguments
case $(grep -c train.py arguments) in 1) exit 70 ;; 2) exit 134 ;; *) exit 75 ;; esac"""
MAKE_VENV = f"""mkdir -p .venv/bin
cat >.venv/bin/python <<'END'
#!/usr/bin/env bash
{PYTHON}
END
chmod +x .venv/bin/python"""
FILES = {
    "bin/gcloud": GCLOUD,
    "bin/tmux": TMUX,
    "bin/python3.12": "",
    f"a b/{SCRIPT}": (ROOT / SCRIPT).read_text(),
    "a b/tools/make_venv.sh": MAKE_VENV,
    "a b/deleted name.py": "",
}
VALUES = ["--config.may_change=('seed', 'data.batch_rows')", '--config.workdir=$HOME/"']


@pytest.mark.parametrize(
    "first, config",
    [
        ("configs/tiny.py", "--config=configs/tiny.py"),
        ("--config=configs/models.py:a/b", "--config=configs/models.py:a/b"),
        ("--workdir=runs/tiny", "--workdir=runs/tiny"),
    ],
)
def test_workers_of_a_tpu_vm_run_the_arguments(first, config, tmp_path):
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/usr/bin/env bash\n{text}\n")
        file.chmod(0o755)
    checkout = tmp_path / "a b"
    for command in ("init -q", "add ."):
        subprocess.run(["git", "-C", checkout, *command.split()], check=True)
    (checkout / "deleted name.py").unlink()
    (checkout / "new.py").touch()
    worker = tmp_path / "home"
    worker.mkdir()
    path = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "WORKER": str(worker)}
    subprocess.run(
        [checkout / SCRIPT, first, *VALUES],
        cwd=tmp_path,
        env=os.environ | path | {"TPU": "mine", "ZONE": "here"},
        check=True,
    )
    arguments = (worker / "annulus/arguments").read_text().splitlines()
    assert arguments == ["train.py", config, *VALUES] * 3
    assert (worker / "annulus/new.py").exists()
