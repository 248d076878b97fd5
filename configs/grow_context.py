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

import ml_collections

from configs import base, models

# tokens of context: (fsdp, ring, rows in a batch, microbatches, steps)
_STAGES = {
    4096: (8, 1, 128, 4, 20_000),
    32_768: (2, 4, 16, 4, 2_000),
    262_144: (1, 8, 2, 2, 500),
}
_FIRST = min(_STAGES)


def get_config(stage: str = str(_FIRST)) -> ml_collections.ConfigDict:
    """Returns the config of a stage, named by its tokens of context.

    Raises:
      ValueError: the stage is unknown.
    """
    names = [str(tokens) for tokens in _STAGES]
    if stage not in names:
        raise ValueError(f"stage {stage!r} is not one of {', '.join(names)}")
    tokens = int(stage)
    fsdp, ring, rows, microbatches, steps = _STAGES[tokens]
    config = base.get_config().unlock()
    config.workdir = f"runs/grow_context/{tokens}"
    config.model.update(models.fields_of("1b"))

    config.data.context_tokens = tokens
    config.data.batch_rows = rows
    config.train.microbatches = microbatches
    config.mesh.fsdp = fsdp
    config.mesh.ring = ring
    config.train.steps = steps

    if tokens > _FIRST:
        before = names[names.index(stage) - 1]
        config.init_from = f"runs/grow_context/{before}"
        config.may_change = ("rope_scaling",)
        config.rope_scaling.rope_type = "yarn"
        config.rope_scaling.factor = tokens / _FIRST
        config.rope_scaling.original_max_position_embeddings = _FIRST
        config.optimizer.peak_lr = 1e-4
        config.optimizer.end_lr = 1e-5
    return config.lock()
