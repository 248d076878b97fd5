"""A small LLaMA that finds RULER's niah_single_1, and not its vt, in three stages.

Command, the corpora first:
  python -m tools.prepare_lines --form letters --context-tokens 32 \\
    --train-tokens 4000000 --tokenizer results/ruler/tokenizer.json \\
    --output corpora/ruler_32
  python -m tools.prepare_lines --ruler niah_single_1,niah_multikey_2,vt \\
    --context-tokens 400 --train-tokens 5000000 --supervised all --seed 7 \\
    --tokenizer results/ruler/tokenizer.json --output corpora/ruler_400
  python -m tools.prepare_lines --ruler niah_single_1,vt --context-tokens 1024 \\
    --train-tokens 5000000 --supervised all --seed 7 \\
    --tokenizer results/ruler/tokenizer.json --output corpora/ruler_1024
  for stage in 32 400 1024; do
    python train.py --config=configs/ruler_tiny.py:$stage; done
  python -m tools.evaluate ruler --workdir=runs/ruler_tiny/1024 \\
    --tasks niah_single_1,niah_multikey_2 --lengths 512,768,1024,2048 \\
    --samples 50 --rows 25 --output ruler_tiny
Each stage starts with the parameters of the one before: the first learns to look
letters up, without which no needle was found after 750 steps.
Without a stage (python train.py --config=configs/ruler_tiny.py) it is the first.
Hardware: none: one simulated CPU device.
Expected: niah_single_1 scores 100, 98 and 98 at 512, 768 and 1024 tokens, and 2 at
2048; niah_multikey_2, and vt at 1024, score 0. A quarter of an hour of one core.
"""

import ml_collections

from configs import base

# tokens of a document: (of a row, rows in a batch, steps, peak of the learning rate).
_STAGES = {
    32: (128, 32, 450, 2e-3),
    400: (640, 8, 930, 1e-3),
    1024: (1152, 8, 600, 7e-4),
}
_FIRST, *_, _LAST = _STAGES


def get_config(stage: str = str(_FIRST)) -> ml_collections.ConfigDict:
    """Returns the config of a stage, named by its tokens of context.

    Raises:
      ValueError: there is no such stage.
    """
    names = [str(tokens) for tokens in _STAGES]
    if stage not in names:
        raise ValueError(f"stage {stage!r} is not one of {', '.join(names)}")
    tokens = int(stage)
    row_tokens, rows, steps, peak_lr = _STAGES[tokens]
    config = base.get_config().unlock()
    config.workdir = f"runs/ruler_tiny/{tokens}"
    config.simulated_devices = 1

    config.model.vocab_size = 512
    config.model.hidden_size = 128
    config.model.feed_forward_size = 256
    config.model.num_layers = 3
    config.model.num_heads = 4
    config.model.num_kv_heads = 4
    config.model.head_dim = 32
    config.compute_dtype = "float32"
    config.remat = "everything"

    config.data.corpus = f"corpora/ruler_{tokens}"
    config.data.rows = "whole"
    config.data.context_tokens = row_tokens
    config.data.batch_rows = rows

    config.optimizer.peak_lr = peak_lr
    config.optimizer.end_lr = peak_lr / (20 if tokens == _LAST else 1)
    config.optimizer.warmup_steps = 100 if tokens == _FIRST else 20
    config.optimizer.beta2 = 0.98
    config.train.steps = steps
    config.train.log_every_steps = 50
    config.train.validate_every_steps = 250
    config.train.validation_batches = 2
    config.checkpoint.save_every_steps = 200
    if tokens > _FIRST:
        before = names[names.index(stage) - 1]
        config.init_from = f"runs/ruler_tiny/{before}"
    return config.lock()
