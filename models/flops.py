"""Counts parameters and floating-point operations of a model from its sizes.

Rematerialisation is never counted: these are the operations that the model needs, not
those that were done.
"""

from models.sizes import DecoderConfig, LanguageModelConfig

FEED_FORWARD = "gate", "up", "down"
"""Matrices that layers of all kinds have; of experts, one of each for each expert."""

TRAIN_FACTOR = 3
"""Forward and backward together, in forwards."""
FROZEN_FACTOR = 2
"""The same of a matrix that is frozen, which has no gradient: only its input has."""


def num_matrix_parameters(config: LanguageModelConfig) -> int:
    """Counts parameters that a token is multiplied with: of experts, the chosen ones.

    No norms, no embedding look-up.

    Where embeddings are tied they are the head, and count.
    """
    return num_layer_matrices(config) + config.hidden_size * config.vocab_size


def num_layer_matrices(config: DecoderConfig) -> int:
    """Counts the layers' parameters that a token is multiplied with."""
    total = 0
    for sizes, kind in zip(config.of_layers, config.layer_kinds, strict=True):
        for name, (inputs, outputs) in sizes.matrix_sides(kind.is_delta).items():
            total += sizes.uses(name) * inputs * outputs
    return total


def num_adapter_parameters(config: DecoderConfig) -> int:
    """Counts the parameters of adapters that a token is multiplied with."""
    total = 0
    for sizes, kind in zip(config.of_layers, config.layer_kinds, strict=True):
        sides = sizes.matrix_sides(kind.is_delta)
        for name in config.lora.matrices:
            if name in FEED_FORWARD or not kind.is_delta:
                inputs, outputs = sides[name]
                lora = sizes.lora
                if name == "up" and lora.gate_up_rank:
                    inputs = 0  # as gate's A is its own
                total += sizes.uses(name) * lora.rank_of(name) * (inputs + outputs)
    return total


def _channels(config: DecoderConfig) -> int:
    """Counts what the convolution of Gated DeltaNet reads of a token."""
    keys = config.delta_key_heads * config.delta_key_dim
    return 2 * keys + config.delta_value_heads * config.delta_value_dim


def train_flops(config: LanguageModelConfig, tokens: float, pairs: float) -> float:
    """Counts a training step's FLOPs: 6 a token and parameter, 12·H·D a pair and layer.

    Of a layer with Gated DeltaNet 18·H·D·V a token, as its state decays, is read twice
    and written once, and 6·W a channel of its convolution.
    With adapters 4 a token and frozen parameter: frozen matrices have no gradients.

    tokens: trained on, without padding.
    pairs: of a query and a key visible to it; T(T + 1)/2 for one causal sequence, the
      sum of that over packed documents; fewer in layers with a window, the mean over
      the layers. So the causal half is counted once, as in MaxText and Megatron.
    """
    head = 2.0 * config.hidden_size * config.vocab_size * tokens
    return _factor(config) * head + layers_train_flops(config, tokens, pairs)


def layers_train_flops(config: DecoderConfig, tokens: float, pairs: float) -> float:
    """Counts the layers' part of `train_flops`, without what comes after them."""
    product = 2.0 * num_layer_matrices(config) * tokens
    adapters = 2.0 * num_adapter_parameters(config) * tokens
    delta = len(config.numbers("delta_layers"))
    heads = (config.num_layers - delta) * config.num_heads
    attention = 4.0 * heads * config.head_dim * pairs
    states = config.delta_value_heads * config.delta_key_dim * config.delta_value_dim
    mixing = 6.0 * states + 2 * config.delta_convolution * _channels(config)
    own = adapters + attention + delta * mixing * tokens
    return _factor(config) * product + TRAIN_FACTOR * own


def _factor(config: DecoderConfig) -> int:
    return FROZEN_FACTOR if config.lora.rank else TRAIN_FACTOR


def paper_train_flops(config: DecoderConfig, rows: int, length: int) -> float:
    """Counts as Ring Attention (2310.01889): (24·b·s·h² + 4·b·s²·h)·n, times 3.

    It takes every key as visible to every query, without vocabulary; to compare with
    the paper's figures only.

    rows, length: b and s, of the batch.
    """
    tokens = rows * length
    hidden = config.hidden_size
    layer = 24 * tokens * hidden**2 + 4 * tokens * length * hidden
    return float(TRAIN_FACTOR * layer * config.num_layers)
