"""Programs refuse wrong command lines in one line, and write nothing."""

import importlib
from pathlib import Path

import pytest

# Files that are wrong in ways of their own, for `{name}` below.
FILES = {
    "garbage": bytes(range(256)),
    "nothing.json": b"",
    "deep.json": b"[" * 100_000,
    "numbers.json": b"[1, 2]",
    "object.json": b'{"a": 1}',
    "rows.json": b'[{"a": 1}]',
    "no_rows.json": b"[]",
    "text.txt": b"The ring turns.\n" * 50,
}

TINY = "--config=configs/tiny.py --config.workdir={new} --config.data.corpus={new}"
TINY += " --config.model.vocab_size=264"
NEW = "--output {new}"

# Program and arguments: what has to be said. {new} is nothing yet, {full} a folder with
# a file, {garbage}/x a path below a file.
CASES = {
    f"prepare_text {{new}} {NEW}": "input {new} does not exist",
    f"prepare_text gs://a/b.txt {NEW}": "gs://a/b.txt is in a bucket",
    "prepare_text {text.txt} --output gs://a/b": "gs://a/b is in a bucket",
    f"prepare_text {{garbage}} {NEW}": "is not UTF-8 text, nor",
    f"prepare_text {{full}} {NEW} --pattern *.md": "there is no text in {full}",
    "prepare_text {text.txt} --output {full}": "{full} already exists",
    "prepare_text {text.txt} --output {garbage}/x": "{garbage}",
    "prepare_text {text.txt}": "arguments are required: --output: see --help",
    f"prepare_text {{text.txt}} {NEW} --outputs x": "unrecognized arguments: --outputs",
    f"prepare_text {{text.txt}} {NEW} --validation-fraction 2": "from 0 to 1, got 2",
    f"prepare_text {{text.txt}} {NEW} --validation-fraction nan": "got nan",
    f"prepare_text {{text.txt}} {NEW} --tokenizer {{new}}": 'tokenizer "{new}"',
    f"prepare_text {{text.txt}} {NEW} --tokenizer {{object.json}}": "a tokenizer.json",
    f"prepare_chat {{new}} {NEW} --context-tokens 64": "input {new} does not exist",
    f"prepare_chat {{garbage}} {NEW} --context-tokens 64": "{garbage} is of no kn",
    f"prepare_chat {{deep.json}} {NEW} --context-tokens 64": "{deep.json} cannot be",
    f"prepare_chat {{numbers.json}} {NEW} --context-tokens 64": "int, and no object",
    f"prepare_chat {{no_rows.json}} {NEW} --context-tokens 64": "no conversation",
    f"prepare_chat {{rows.json}} {NEW} --context-tokens -1": "of at least 1, got -1",
    f"prepare_chat {{rows.json}} {NEW} --context-tokens 1.5": "number, got '1.5'",
    f"prepare_chat {{rows.json}} {NEW} --context-tokens 9 --template llama3": "the byte"
    "s tokenizer has no token",
    f"prepare_lines {NEW} --context-tokens 4": "3 tokens are too few for a record",
    f"prepare_lines {NEW} --context-tokens 64 --validation-tokens 0": "got 0: see",
    f"prepare_lines {NEW} --context-tokens 64 --seed -1": "at least 0, got -1",
    f"prepare_lines {NEW} --context-tokens 64 --ruler vt": "64 tokens are too few for",
    f"prepare_lines {NEW} --context-tokens 64 --ruler qa_1": "must be one of niah_sing",
    f"make_exorl {NEW} --domain hopper": "invalid choice: 'hopper'",
    f"make_exorl {NEW} --domain cartpole --tasks run": "task='run' of cartpole must",
    f"make_exorl {NEW} --domain cartpole --cap -1": "cap=-1.0 above 0 and up to 1",
    f"make_exorl {NEW} --domain cartpole --action-repeat 1001": "the 1000 steps",
    f"make_exorl {NEW} --domain cartpole --search-episodes 0": "at least 1, got 0",
    "make_exorl --domain cartpole --output {garbage}/x --episodes 1": "{garbage}",
    f"make_worlds {NEW} --action-repeat 1001": "the 1000 steps",
    "pack_exorl --root {full} --domain walker --algorithm rnd --task run --cache {new} "
    "--targets": "--targets are known of cartpole alone, not of walker",
    f"make_worlds {NEW} --worlds 0": "at least 1, got 0",
    "pack_exorl --root {full} --domain walker --algorithm rnd --task run --cache {new}"
    " --tolerance nan": "at least 0, got nan",
    "figures rates {new} --output {full}/x.png": "{new}",
    "figures rates {garbage} --output {full}/x.png": "{garbage} is not JSON",
    "figures rates {deep.json} --output {full}/x.png": "{deep.json} is not JSON",
    "figures rates {numbers.json} --output {full}/x.png": "{numbers.json}",
    "figures rates {object.json} --output {full}/x.png": "{object.json}",
    "figures rates {rows.json} --output {full}/x.png": "{rows.json}",
    "figures lines {rows.json} --output {full}/x.png": "{rows.json}",
    "figures lines {no_rows.json} --output {full}/x.png": "no rows",
    "figures lines {full} --output {full}/x.png": "{full}",
    "figures returns {deep.json} --output {full}/x.png": "{deep.json}",
    "figures work --ring 0 --output {new}": "at least 1, got 0",
    "figures work --output {garbage}/x": "{garbage}",
    "paper_tables --compile contexts --only 9b --output {new}": "no row 9b: known are",
    "paper_tables --only 7b_v4_nothing --output {full}": "contexts: give both",
    f"plan_pod --topology v5e:2x4 {TINY} --output {{full}}/file": "{full}/file exists",
    f"plan_pod --topology v5e:2x4 {TINY} --config.seed=-1": "config.seed=-1 must be",
    "plan_pod --topology v5e:2x4 --config={new}": "there is no config {new}",
    "plan_pod --topology v5e:2x4 --documents 0": "at least 1, got 0",
    "tpu_kernel_parts --check 1": "at least 1024, got 1",
    "tpu_kernel_parts --output {full}/file": "{full}/file exists",
    "tpu_schedule --block-q 0": "at least 1, got 0",
    "tpu_schedule --output {full}/file": "{full}/file exists",
    "tune_block_sizes --jobs 0": "at least 1, got 0",
    "tune_block_sizes --output {full}/file": "{full}/file exists",
    "tune_block_sizes --direction backward --ahead 1": "backward kernel has no ahead",
    "tune_block_sizes --rows 100": "powers of 2 from 128 on, got",
    "bench_attention --length 0": "--length: must be a whole number of at least 1",
    "bench_attention --output {new}/rows.json": "{new} is not a directory",
    "bench_kernels --lengths 16 --contestants pallas_tpu_x": "invalid choice",
    "bench_kernels --lengths 16 --contestants cudnn --output {new}": "none of cudnn can"
    " be measured here",
    "bench_original --python {new} --devices 0": "at least 1, got 0",
    "bench_train --config configs/tiny.py --steps 2": "at least 3, got 2",
    "bench_attention --devices 9": "--devices 9, but there are 8 of cpu: ask for fewer",
    "bench_attention --output {full}/file": "{full}/file exists: give another --output",
    "bench_attention --layouts spiral": "invalid choice: 'spiral'",
    "bench_attention --implementations fast": "invalid choice: 'fast'",
    "bench_attention --implementations reference --block-q 8": 'reference" has no bl',
    "bench_attention --heads 6 --kv-heads 4": "must be a multiple of --kv-heads 4, got",
    "bench_kernels --heads 3 --kv-heads 2": "must be a multiple of --kv-heads 2, got 3",
    "bench_kernels --lengths 0": "--lengths: must be a whole number of at least 1",
    "bench_kernels --contestants cudnn --lengths 8 --output {full}/x": "none of cudnn "
    "can be measured here",
    "bench_kernels --output {new}/rows.json": "{new} is not a directory: make it first",
    "bench_train --config configs/tiny.py --contexts 0": "at least 1, got 0",
    "simulate_ring --heads 3 --kv-heads 2": "must be a multiple of --kv-heads 2, got 3",
    "simulate_ring --ring-size 0": "--ring-size: must be a whole number of at least 1",
    "simulate_ring --output {full}/file": "{full}/file exists",
    "convert_hf import {new} {new}": "{new}/config.json does not exist",
    "convert_hf import {full} {full}": "{full} already exists",
    "convert_hf export {new} {new}": "{new} has no checkpoints to read",
    "convert_hf export {new} {full}": "{full} already exists and is left as it is",
    "convert_hf export {full} {new} --file-gigabytes nan": "got nan",
    "convert_hf export {full} {new} --file-gigabytes 0": "least 1e-09, got 0",
    "evaluate": "arguments are required: subcommand",
    "evaluate lines": "invalid choice: 'lines' (choose from",
    f"evaluate loss {TINY} --output {{rows.json}}": "{rows.json} exists",
    "figures losses {rows.json} --output {full}/x.png": "row 0 has no below, by,",
    f"evaluate line-retrieval {TINY} --output {{rows.json}}": "{rows.json} exists",
    f"evaluate line-retrieval {TINY} --lengths 64,x": "whole number, got 'x'",
    f"evaluate line-retrieval {TINY} --lengths 64,-4": "of at least 1, got -4",
    f"evaluate line-retrieval {TINY} --config.task=exorl": "makes no text",
    f"evaluate line-retrieval {TINY} --tokenizer bytes": "{new} has no checkpoints",
    f"evaluate exorl {TINY} --output {{full}}/x.json": "\"exorl\", got 'text'",
    f"evaluate exorl {TINY} --output {{full}}/file": "{full}/file exists",
    f"generate {TINY}": "there is no corpus {new}",
    f"generate {TINY} --config.task=exorl": "config.task='exorl' makes no text",
    f"generate {TINY} --tokenizer bytes": "{new} has no checkpoints to read",
    f"generate {TINY} --tokenizer bytes --prompt-file {{garbage}}": "is not text",
    f"generate {TINY} --tokenizer bytes --top-p 0": "top_p=0.0 must be",
    f"generate {TINY} --tokenizer bytes --config.attention=blockwise": "set config.mesh"
    ".ring=1, config.mesh.fsdp=8",
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_command_line_is_one_line_and_writes_nothing(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()

    def filled(text: str) -> str:
        for name in (*FILES, "full", "new"):
            text = text.replace(f"{{{name}}}", str(tmp_path / name))
        return text

    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    program, *arguments = filled(case).split()
    assert importlib.import_module(f"tools.{program}").main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and filled(CASES[case]) in line, line
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
