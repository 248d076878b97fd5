"""A small LLaMA that follows RULER's chains of variables, alone, in six stages.

Command, of stage 1, its corpus first:
  python -m tools.prepare_lines --ruler vt --bare --context-tokens 47 \\
    --train-tokens 500000 --supervised all --seed 7 \\
    --tokenizer results/ruler/names_tokenizer.json --output corpora/ruler_chain_1
  python train.py --config=configs/ruler_chain.py:1
Each stage starts with the parameters of the one before. Documents of two names come
first, and few of them, seen many times: there the model begins to copy names, which it
did not in 600 steps on documents of 128 tokens. The later stages go as the first, with
the context and train tokens of `STAGES`.
Without a stage (python train.py --config=configs/ruler_chain.py) it is the first.
Hardware: none: one simulated CPU device.
Expected: in chains of 2, 3, 4 and 5 names, 100, 100, 75 and 81 % of them are found; in
RULER's prompts of 1024 tokens none. 20 minutes of a busy core.
"""

import ml_collections

from configs import ruler_tiny

# Stage: (tokens of a document, of the corpus, of a row, rows in a batch, steps, rate).
STAGES = {
    1: (47, 500_000, 48, 24, 614, 3e-3),
    2: (47, 80_000, 48, 24, 1102, 3e-3),
    3: (128, 1_500_000, 128, 12, 857, 2e-3),
    4: (66, 120_000, 68, 24, 963, 3e-3),
    5: (102, 300_000, 104, 16, 828, 2.5e-3),
    6: (128, 1_500_000, 128, 12, 1000, 2e-3),
}


def get_config(stage: str = "1") -> ml_collections.ConfigDict:
    """Returns the config of a stage, named by its number.

    Raises:
      ValueError: there is no such stage.
    """
    if stage not in map(str, STAGES):
        raise ValueError(f"stage {stage!r} is not one of {', '.join(map(str, STAGES))}")
    _, _, row_tokens, rows, steps, rate = STAGES[int(stage)]
    config = ruler_tiny.get_config().unlock()
    config.workdir = f"runs/ruler_chain/{stage}"
    if stage != "1":
        config.init_from = f"runs/ruler_chain/{int(stage) - 1}"
    config.attention = "vanilla"

    config.model.vocab_size = 1128
    config.model.hidden_size = 96
    config.model.feed_forward_size = 192
    # Scores of random parameters are otherwise as good as 0 at this width.
    config.model.qk_norm = "head"
    config.model.tied_embeddings = True

    config.data.corpus = f"corpora/ruler_chain_{stage}"
    config.data.context_tokens = row_tokens
    config.data.batch_rows = rows

    config.optimizer.peak_lr = rate
    config.optimizer.end_lr = 1e-4 if int(stage) == max(STAGES) else rate
    config.optimizer.warmup_steps = 30
    config.train.steps = steps
    config.train.validation_batches = 4
    return config.lock()
