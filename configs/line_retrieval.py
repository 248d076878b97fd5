"""A small byte-level LLaMA that is to find lines of a record, in two stages.

Command, the corpora first:
  for tokens in 32 160; do python -m tools.prepare_lines --form letters \\
    --context-tokens $tokens --train-tokens 4000000 \\
    --output corpora/lines_$tokens; done
  python train.py --config=configs/line_retrieval.py:32
  python train.py --config=configs/line_retrieval.py:160
The second stage starts with the parameters of the first, which alone is the baseline of
a short context. Both are evaluated on the same records with
  python -m tools.evaluate line-retrieval --config=configs/line_retrieval.py:160 \\
    --form letters --lengths 32,64,96,128,160 --compare runs/line_retrieval/32
Without a stage (python train.py --config=configs/line_retrieval.py) it is the first.
Hardware: none: 8 simulated CPU devices, fsdp 2 x ring 4, striped.
Expected: the held-out loss stays near 0.3 nats for 300 steps, and is below 0.02 after
600, as lines are found; the second stage ends at 99 % of 100 records of 160 tokens,
where the first finds 17 %. Fifteen minutes on two busy cores.
"""

import ml_collections

from configs import base

# tokens of a document: (of a row, rows in a batch, steps, peak of the learning rate).
# Rows hold several documents whole: one alone would leave half of a row empty.
_STAGES = {
    32: (128, 32, 1000, 2e-3),
    160: (320, 16, 400, 1e-3),
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
    row_tokens, rows, steps, peak_lr = _STAGES[tokens]
    config = base.get_config().unlock()
    config.workdir = f"runs/line_retrieval/{tokens}"
    config.simulated_devices = 8

    # 256 bytes and the end of a document; the rest divides the table evenly.
    config.model.vocab_size = 264
    config.model.hidden_size = 128
    config.model.feed_forward_size = 128
    config.model.num_layers = 2
    config.model.num_heads = 8
    config.model.num_kv_heads = 8
    config.model.head_dim = 32
    config.compute_dtype = "float32"
    config.remat = "everything"

    config.mesh.fsdp = 2
    config.mesh.ring = 4

    config.data.corpus = f"corpora/lines_{tokens}"
    config.data.rows = "whole"
    config.data.context_tokens = row_tokens
    config.data.batch_rows = rows

    config.optimizer.peak_lr = peak_lr
    # Finding lines is learned all at once, and not while the rate is low.
    config.optimizer.end_lr = peak_lr / (1 if tokens == _FIRST else 20)
    config.optimizer.warmup_steps = 100 if tokens == _FIRST else 20
    config.optimizer.beta2 = 0.98
    config.train.steps = steps
    config.train.log_every_steps = 100
    config.train.validate_every_steps = 100
    config.train.validation_batches = 4
    config.checkpoint.save_every_steps = 500
    if tokens > _FIRST:
        config.init_from = f"runs/line_retrieval/{_FIRST}"
    return config.lock()
