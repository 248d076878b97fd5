"""Bad input is refused with its value and a remedy, before anything is compiled."""

import shutil
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import train
from tasks.command_line import read_config
from tests.processes import Processes
from tests.runs import checkpoints_of, files, small_config, small_flags


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch):
    """Fails the test where the trainer makes a program, however small."""
    error = AssertionError("bad input was not refused before jax.jit")
    monkeypatch.setattr(jax, "jit", mock.Mock(side_effect=error))


def refusal(config: Any) -> str:
    """What `train` says of a config."""
    with pytest.raises((ValueError, OSError)) as caught:
        train.train(config, lambda line: None)
    return str(caught.value)


# Fields that are wrong => what the message must contain: values and remedies.
BAD_CONFIGS = """\
mesh.fsdp=3 => fsdp 3 | 8 devices | change config.mesh
mesh.ulysses=3 => ulysses 3 | 8 devices | change config.mesh
mesh.ulysses=0 => config.mesh.ulysses=0 | at least 1
mesh.ring=1 mesh.tensor=4 => 2 config.model.num_kv_heads | tensor (4 | change config
model.num_kv_heads=0 => num_kv_heads=0 | at least
model.head_dim=7 => head_dim=7 | even
model.vocab_size=200 => token 256 | vocab_size=200 | at least 257
remat=some => config.remat='some' | attention | nothing
remat=tail attention=ring => config.remat='tail' | Contiguous | config.attention=striped
remat=tail attention=zigzag => config.remat='tail' | Zigzag | config.remat=attention
implementation=cuda => implementation='cuda' | blockwise
data.corpus=a:1,b => config.data.corpus='a:1,b' | weights for some only | "a:0.7,b:0.3"
data.corpus=gs://a/b:0.7 => gs://a/b is in a bucket | or mount the bucket
data.rows=lines => rows='lines' | packed, documents
data.rows=whole => row of 80 | take a longer context
mask=slide(4) => config.mask='slide(4)' | "prefix(N)" | as in "window(4096)"
mask=window(4)&prefix(2) => config.mask='window(4)&prefix(2)' | not joined
mask=window(0) => config.mask='window(0)' | from 1 to
mask=prefix(4) remat=tail => config.mask='prefix(4)' | set config.remat=attention
mask=prefix(80) => config.mask='prefix(80)' | below config.data.context_tokens=80
mask=prefix(4) model.layer_pattern=w model.window=4 => config.mask='prefix(4)' | \
config.model.layer_pattern='w' | "causal"
mask=window(4) task=exorl => config.mask='window(4)' is not for agents
attention_parts=2 model.qk_norm=all => config.attention_parts=2 | \
config.model.qk_norm='all' | set it to 1
model.layer_pattern=wg model.window=4 => config.model.layer_pattern='wg' | "wwwwwf"
model.layer_pattern=wf => config.model.window=0 | at least 1
model.window=4 => config.model.window=4 | 0 without
model.norms=around => config.model.norms='around' | 'before', 'after', 'both'
model.logit_soft_cap=-1.0 => config.model.logit_soft_cap=-1.0 | at least 0
remat=offload remat_budget_gib=1.0 => config.remat='offload' | nothing, tail, attention
remat_budget_gib=nan => config.remat_budget_gib=nan | at least 0
compute_dtype=flaot32 => compute_dtype='flaot32' | bfloat16 | float32
compute_dtype=int8 => compute_dtype='int8' | bfloat16 | float32
data.context_tokens=80000 => 80000 tokens | shorten the context or prepare more text
data.batch_rows=5 => batch_rows=5 | multiple of 2
data.batch_rows=4000 => config.data.batch_rows=4000 | fewer rows
data.batch_rows=0 => batch_rows=0 | multiple of 2
data.batch_rows=-4 => batch_rows=-4 | multiple of 2
train.microbatches=3 => batch_rows=4 | microbatches=3 | multiple of 6
train.microbatches=4 => batch_rows=4 | microbatches=4 | multiple of 8
data.threads=8 => config.data.threads=8 | config.data.buffered_steps=4
attention_parts=3 => config.attention_parts=3 | key/value heads | choose a divisor
data.chain_order=best => config.data.chain_order='best' | ascending
seed=4294967296 => config.seed=4294967296 | below 2^32
metrics=('xprof',) => config.metrics=('xprof',) | 'tensorboard', 'wandb'
metrics=('wandb','wandb') => config.metrics=('wandb', 'wandb') | once
metrics=('tensorboard','wandb') => needs wandb, which is not installed | \
requirements-wandb.txt
profile=25-30 => config.profile='25-30' | config.train.steps=20
optimizer.peak_lr=inf => config.optimizer.peak_lr=inf | finite
optimizer.weight_decay=nan => config.optimizer.weight_decay=nan | finite
optimizer.name=adam => config.optimizer.name='adam' | adamw, adafactor, muon
optimizer.moments=int8 optimizer.placement=disk => moments='int8' | bfloat16, float8 \
| config.optimizer.placement='disk' | device, host
optimizer.placement=host_all train.microbatches=2 remat=everything => \
config.train.microbatches=2 | set it to 1 | config.remat='everything' | 'nothing'
optimizer.placement=host_all model.layer_pattern=wf model.window=4 => \
config.model.layer_pattern='wf' | set it to ''
optimizer.placement=host_all remat_budget_gib=1.0 => config.remat_budget_gib=1.0 | 0.0
optimizer.name=adafactor optimizer.moments=float8 => config.optimizer.moments=float8 | \
config.optimizer.name=adafactor | float32
optimizer.parameters=float16 => config.optimizer.parameters='float16' | bfloat16
optimizer.momentum=1.0 => config.optimizer.momentum=1.0 | below 1
model.rope_theta=inf => config.model.rope_theta=inf | above 0
workdir= => config.workdir='' | must be a directory
workdir=ftp://a/b => config.workdir='ftp://a/b'
workdir=gs://a/b => gs://a/b | needs gcsfs
lora.rank=-1 => config.lora.rank=-1 | at least 0
lora.rank=8 => config.lora.rank=8 | set config.init_from, or config.lora.rank=0
lora.rank=17 init_from=x => config.lora.rank=17 | at most 16 | config.lora.targets='q
lora.rank=2 init_from=x task=exorl => config.lora.rank=2 is for task text
lora.rank=2 init_from=nowhere => nowhere has no checkpoints
lora.targets=q,w => config.lora.targets='q,w' | q,k,v,o,gate,up,down
lora.targets= => config.lora.targets='' | separated by commas
lora.targets=q,q => config.lora.targets='q,q' | each once
lora.alpha=0.0 => config.lora.alpha=0.0 | above 0
lora.base_dtype=int4 => config.lora.base_dtype='int4' | "", bfloat16, float32
init_from=gs://a/b => config.init_from='gs://
model.num_kv_heads=3 => config.model.num_heads=4 | config.model.num_kv_heads=3 | \
multiple
model.vocab_size=9223372036854775808 model.hidden_size=2147483648 => below 2^31 | \
vocab_size=9223372036854775808 | hidden_size=2147483648
attention=flash => attention='flash' | vanilla, memory_efficient, blockwise, ring, \
striped
attention=vanilla => config.attention='vanilla' | a ring of 4 | \
set config.mesh.ring=1, config.mesh.fsdp=8, config.data.batch_rows=8
attention=vanilla mesh.ring=2 mesh.ulysses=2 => config.attention='vanilla' | \
a ring of 2 and ulysses of 2 | set config.mesh.ulysses=1, config.mesh.ring=1, config.m
optimizer.warmup_steps=30 => lower config.optimizer.warmup_steps | \
config.optimizer.warmup_steps=30 config.train.steps=20
rope_scaling.factor=4.0 => config.rope_scaling.factor=4.0 | \
config.rope_scaling.rope_type='none'
seed=-1 mesh.fsdp=3 remat=some optimizer.beta1=1.0 optimizer.end_lr=1.0 \
model.head_dim=7 guard.stop_after=0 => config.seed=-1 | fsdp 3 | \
config.remat='some' | config.optimizer.beta1 | config.optimizer.end_lr=1.0 | \
head_dim=7 | config.guard.stop_after=0
""".splitlines()
COUNTS = "checkpoint.save_every_steps train.extra_steps train.validation_batches seed"
COUNTS += " simulated_devices feed_forward_chunk_tokens loss_chunk_tokens"
SIZES = "mesh.fsdp train.microbatches train.steps train.log_every_steps stripe_granule"
SIZES += " train.validate_every_steps checkpoint.keep guard.stop_after"
SIZES += " data.context_tokens"
FLOATS = "guard.spike_sigmas guard.step_seconds remat_budget_gib"
BAD_CONFIGS += [
    f"{name}={low} => config.{name}={low} | at least {least}"
    for low, least, names in ((-1, 0, COUNTS), (-1.0, 0, FLOATS), (0, 1, SIZES))
    for name in names.split()
]


@pytest.mark.parametrize("row", BAD_CONFIGS)
def test_a_bad_config_is_refused(corpus, tmp_path, row):
    fields, parts = row.split(" => ")
    flags = [f"--config.{field}" for field in fields.split()]
    config = read_config([*small_flags(corpus, tmp_path / "run"), *flags])
    message = refusal(config)
    assert all(part in message for part in parts.split(" | ")), message
    assert not (tmp_path / "run").exists()


def test_a_good_config_would_be_compiled(corpus, tmp_path):
    config = small_config(corpus, tmp_path)
    with pytest.raises(AssertionError, match="not refused before jax.jit"):
        train.train(config, lambda line: None)


def test_a_missing_corpus_is_refused(corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "books")
    (tmp_path / "texts").mkdir()
    make = "or make one: python -m tools.prepare_text"
    for name, why in {
        "boks": f"; {tmp_path}/books is one: give the directory of one, {make} TEXTS ",
        "texts": f", it has no meta.json: give the directory of one, {make} {tmp_path}",
    }.items():
        message = refusal(small_config(tmp_path / name, tmp_path / "run"))
        assert message.startswith(f"there is no corpus {tmp_path / name}{why}")
        assert message.endswith(" --output CORPUS")


def test_a_damaged_corpus_is_refused(corpus, tmp_path):
    copy = shutil.copytree(corpus, tmp_path / "corpus")
    tokens = copy / "validation.tokens.bin"
    ids = np.fromfile(tokens, "<u2")
    ids[100] = 32_768
    ids.tofile(tokens)
    message = refusal(small_config(copy, tmp_path / "run"))
    assert f"{tokens} " in message and "is not what was written" in message
    assert "copy it again or prepare the corpus again" in message


def test_a_checkpoint_of_another_model_is_refused_and_kept(corpus, tmp_path):
    scaled = {"rope_scaling__rope_type": "linear", "rope_scaling__factor": 2.0}
    sizes = {"model__num_layers": 3, "model__head_dim": 16}
    with checkpoints_of(small_config(corpus, tmp_path, **sizes, **scaled)) as saved:
        saved.save(7, {"weights": np.arange(5.0)})
    before = files(tmp_path)
    message = refusal(small_config(corpus, tmp_path))
    assert f"step 7 in {tmp_path / 'checkpoints'} belongs to another model" in message
    assert "num_layers: saved 3, this run 2" in message
    assert "head_dim: saved 16, this run 8" in message
    assert "rope_scaling.rope_type: saved linear, this run nothing" in message
    assert "use another workdir" in message
    assert files(tmp_path) == before


@pytest.mark.thorough
def test_the_command_line_says_one_line_and_fails(corpus, tmp_path):
    refused = {
        "implementation=pallas_tpu": "config.implementation='pallas_tpu' cannot attend"
        " | needs a TPU",
        "hosts.coordinator=head:1234": "config.hosts.count=0 | index from 0",
    }
    command = ["train.py", *small_flags(corpus, tmp_path / "run")]
    with Processes([[*command, f"--config.{field}"] for field in refused]) as runs:
        ends = runs.finish()
    for (status, _, errors), parts in zip(ends, refused.values(), strict=True):
        assert status == 1, errors
        assert len(errors.splitlines()) == 1 and errors.startswith("error: "), errors
        assert all(part in errors for part in parts.split(" | ")), errors
    assert not (tmp_path / "run").exists()
