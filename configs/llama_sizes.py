"""Sizes of the papers' models: data for configs, tools and tests."""

import ml_collections

VOCAB_SIZE = 32_000

# name: (hidden size, feed-forward size, layers, heads)
_SIZES = {
    "1b": (2048, 5504, 22, 16),
    "3b": (3200, 8640, 26, 32),  # head size 100
    "7b": (4096, 11008, 32, 32),
    "13b": (5120, 13824, 40, 40),
    "30b": (6656, 17920, 60, 52),
    "65b": (8192, 22016, 80, 64),
}

NAMES = tuple(_SIZES)


def llama(name: str) -> ml_collections.ConfigDict:
    """Returns the fields of `config.model` that a size sets.

    The vocabulary is the papers'; --config.model.vocab_size=0 takes the corpus's.
    """
    hidden, feed_forward, layers, heads = _SIZES[name]
    return ml_collections.ConfigDict(
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": hidden,
            "feed_forward_size": feed_forward,
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": heads,
            "head_dim": hidden // heads,
        }
    )
