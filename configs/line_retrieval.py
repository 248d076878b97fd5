"""A small byte-level LLaMA that is to find lines of a record, in two stages.

Command, the corpora first:
  for tokens in 32 160; do python -m tools.prepare_lines --form letters \\
    --context-tokens $tokens --train-tokens 4000000 \\
    --output corpora/lines_$tokens; done
  python train.py --config=configs/line_retrieval.py:32
  python train.py --config=configs/line_retrieval.py:160
The second stage starts with the parameters of the first, which alone is the baseline of
a short context. Both are evaluated on the same records, the first with :32, with
  python -m tools.evaluate ruler --config=configs/line_retrieval.py:160 --tasks lines \\
    --form letters --lengths 32,64,96,128,160 --samples 100 --output lines_160
Without a stage (python train.py --config=configs/line_retrieval.py) it is the first.
Hardware: none: 8 simulated CPU devices, fsdp 2 x ring 4, striped.
Expected: the held-out loss stays near 0.3 nats for 300 steps, and is below 0.02 after
600, as lines are found; the second stage ends at 99 % of 100 records of 160 tokens,
where the first finds 17 %. Fifteen minutes on two busy cores.
"""

from ml_collections import ConfigDict

from configs import base

# Tokens of a document: those of a row, rows in a batch, steps, steps of warm-up, the
# learning rate at its peak, and at its end. Rows hold several documents whole: one
# alone would leave half of a row empty. Finding lines is learned all at once, and not
# while the rate is low.
_STAGES = {
    "32": (128, 32, 1000, 100, 2e-3, 2e-3),
    "160": (320, 16, 400, 20, 1e-3, 5e-5),
}


def get_config(stage: str = "32") -> ConfigDict:
    """Returns the config of a stage, named by its tokens of context.

    Raises:
      ValueError: the stage is unknown.
    """
    if stage not in _STAGES:
        raise ValueError(f"stage {stage!r} is not one of {', '.join(_STAGES)}")
    row_tokens, rows, steps, warmup_steps, peak_lr, end_lr = _STAGES[stage]
    rates = dict(peak_lr=peak_lr, end_lr=end_lr, warmup_steps=warmup_steps, beta2=0.98)
    return base.changed(
        workdir=f"runs/line_retrieval/{stage}",
        init_from="" if stage == "32" else "runs/line_retrieval/32",
        simulated_devices=8,
        model=dict(
            # 256 bytes and the end of a document; the rest divides the table evenly.
            vocab_size=264,
            hidden_size=128,
            feed_forward_size=128,
            num_layers=2,
            num_heads=8,
            num_kv_heads=8,
            head_dim=32,
        ),
        compute_dtype="float32",
        remat="everything",
        mesh=dict(fsdp=2, ring=4),
        data=dict(
            corpus=f"corpora/lines_{stage}",
            rows="whole",
            context_tokens=row_tokens,
            batch_rows=rows,
        ),
        optimizer=rates,
        train=dict(steps=steps, log_every_steps=100, validation_batches=4),
        checkpoint=dict(save_every_steps=500),
    )
