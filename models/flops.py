"""Parameters and floating-point operations of a model, counted from its sizes.

Rematerialisation is never counted: these are the operations that the model needs, not
those that were done.
"""

from models.llama import DecoderConfig, LlamaConfig

TRAIN_FACTOR = 3
"""Forward and backward together, in forwards."""


def num_parameters(config: LlamaConfig) -> int:
    """All parameters."""
    norms = (2 * config.num_layers + 1) * config.hidden_size
    return (
        num_matrix_parameters(config) + config.vocab_size * config.hidden_size + norms
    )


def num_matrix_parameters(config: LlamaConfig) -> int:
    """Parameters that take part in matrix products: no norms, no embedding look-up."""
    return num_layer_matrices(config) + config.hidden_size * config.vocab_size


def num_layer_matrices(config: DecoderConfig) -> int:
    """Parameters of the layers that take part in matrix products."""
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    attention = config.hidden_size * heads * config.head_dim
    feed_forward = 3 * config.hidden_size * config.feed_forward_size
    return config.num_layers * (attention + feed_forward)


def train_flops(config: LlamaConfig, tokens: float, pairs: float) -> float:
    """Model FLOPs of a training step: 6 a token and parameter, 12·H·D a pair and layer.

    tokens: trained on, without padding.
    pairs: of a query and a key that it sees; T(T + 1)/2 for one causal sequence, the
      sum of that over packed documents. So the causal half is counted once, as in
      MaxText and Megatron.
    """
    head = 2.0 * config.hidden_size * config.vocab_size * tokens
    return TRAIN_FACTOR * head + layers_train_flops(config, tokens, pairs)


def layers_train_flops(config: DecoderConfig, tokens: float, pairs: float) -> float:
    """The part of `train_flops` that is of the layers, whatever comes after them."""
    product = 2.0 * num_layer_matrices(config) * tokens
    attention = 4.0 * config.num_layers * config.num_heads * config.head_dim * pairs
    return TRAIN_FACTOR * (product + attention)


def paper_train_flops(config: DecoderConfig, rows: int, length: int) -> float:
    """The count of Ring Attention (2310.01889): (24·b·s·h² + 4·b·s²·h)·n, times 3.

    It takes every query to see every key, and has no vocabulary; for comparisons with
    the paper's figures only.

    rows, length: b and s, of the batch.
    """
    tokens, hidden = rows * length, config.hidden_size
    layer = 24 * tokens * hidden**2 + 4 * tokens * length * hidden
    return float(TRAIN_FACTOR * layer * config.num_layers)
