"""LLaMA 1B whose context grows in stages: 4 Ki, 32 Ki, then 256 Ki tokens.

Command, one stage after the other, on 8 devices:
  python train.py --config=configs/grow_context.py:4096 --config.data.corpus=CORPUS
  python train.py --config=configs/grow_context.py:32768 --config.data.corpus=CORPUS
  python train.py --config=configs/grow_context.py:262144 --config.data.corpus=CORPUS
Each stage has a workdir of its own, runs/grow_context/TOKENS, and starts with the
newest parameters of the stage before (config.init_from), with a schedule
and an optimizer of its own. The ring grows from 1 to 4 to 8 devices, and RoPE is scaled
by YaRN from the first stage's context. Without a stage (python train.py
--config=configs/grow_context.py) it is the first.
Hardware: 8 H200, or 8 other devices with as much memory.
Expected: not run at this size yet; tests/test_grow_context.py runs it small.
"""

from ml_collections import ConfigDict

from configs import base, models

# tokens of context: (fsdp, ring, rows in a batch, microbatches, steps)
_STAGES = {
    "4096": (8, 1, 128, 4, 20_000),
    "32768": (2, 4, 16, 4, 2_000),
    "262144": (1, 8, 2, 2, 500),
}
_FIRST = 4096


def get_config(stage: str = "4096") -> ConfigDict:
    """Returns the config of a stage, named by its tokens of context.

    Raises:
      ValueError: the stage is unknown.
    """
    if stage not in _STAGES:
        raise ValueError(f"stage {stage!r} is not one of {', '.join(_STAGES)}")
    fsdp, ring, rows, microbatches, steps = _STAGES[stage]
    config = base.changed(
        workdir=f"runs/grow_context/{stage}",
        attention="auto",
        model=models.fields_of("1b"),
        mesh=dict(fsdp=fsdp, ring=ring),
        data=dict(context_tokens=int(stage), batch_rows=rows),
        train=dict(microbatches=microbatches, steps=steps),
    )
    if int(stage) > _FIRST:
        before = [*_STAGES][[*_STAGES].index(stage) - 1]
        config.init_from = f"runs/grow_context/{before}"
        config.may_change = ("rope_scaling",)
        config.rope_scaling.rope_type = "yarn"
        config.rope_scaling.factor = int(stage) / _FIRST
        config.rope_scaling.original_max_position_embeddings = _FIRST
        config.optimizer.update(peak_lr=1e-4, end_lr=1e-5)
    return config
