"""Rotary position embedding (RoFormer, 2104.09864), exact at any position.

Positions come with the data, so packed and permuted tokens need nothing special. For a
context longer than a model was trained with, `RopeScaling` changes the frequencies.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Rotation(NamedTuple):
    """RoPE at every token.

    cosine, sine: of the angles, (B, T, 1, D / 2) float32.
    query_factor: of queries alone, (B, T, 1, 1) float32; None for 1.
    """

    cosine: jax.Array
    sine: jax.Array
    query_factor: jax.Array | None = None


_DIGIT = 1024
"""Positions are split into digits of this base: see `rotations`."""

ROPE_TYPES = ("none", "linear", "ntk", "yarn", "llama3", "longrope")
WITH_ORIGINAL = ("yarn", "llama3", "longrope")
"""Types that need the context that the model was trained with before."""


@dataclass(frozen=True)
class RopeScaling:
    """Change of the frequencies for a longer context; Hugging Face's field names.

    rope_type: "none"; "linear" (position interpolation, 2306.15595); "ntk" (a base that
      is larger by factor^(D / (D - 2)), "NTK-aware"); "yarn" (2309.00071); "llama3"
      (as in Meta's LLaMA 3.1); "longrope" (2402.13753).
    factor: the new context over the original one.
    original_max_position_embeddings: tokens of context that the model was trained with
      before; for yarn, llama3 and longrope.
    low_freq_factor, high_freq_factor: of llama3: frequencies of fewer rotations in the
      original context than the first are interpolated, of more than the second stay.
    beta_fast, beta_slow: of yarn: rotations in the original context above which
      frequencies stay, and below which they are interpolated.
    attention_factor: of yarn and longrope: factor on queries and keys each, the
      papers' sqrt(1 / t); 0 for 0.1 ln(factor) + 1, of longrope for
      sqrt(1 + ln(factor) / ln(original context)).
    truncate: of yarn: whether interpolation begins and ends at whole pairs, as in the
      authors' program.
    short_factor, long_factor: of longrope: what the frequency of each pair is divided
      by, (D / 2,), in rows of up to the original context, and in longer ones.
    query_scale: b: the query at position p is multiplied by
      1 + b ln(1 + floor(p / original context)), as in Llama 4 and Ministral 3.

    Raises:
      ValueError: an unknown type, or values that it has no meaning for.
    """

    rope_type: str = "none"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    query_scale: float = 0.0

    def __post_init__(self):
        kind = self.rope_type
        original = self.original_max_position_embeddings
        errors = []
        if kind not in ROPE_TYPES:
            errors.append(f"rope_type={kind!r} must be one of {', '.join(ROPE_TYPES)}")
        if not 1 <= self.factor < math.inf or (kind == "none" and self.factor != 1):
            errors.append(
                f"factor={self.factor} of rope_type={kind!r} must be at least 1, and 1 "
                "without scaling: give new context / original context"
            )
        if (kind in WITH_ORIGINAL or self.query_scale) and original < 1:
            errors.append(
                f"rope_type={kind!r} with query_scale={self.query_scale} needs the "
                "context that the model was trained with before: "
                f"original_max_position_embeddings={original} must be at least 1"
            )
        counts = {len(self.short_factor), len(self.long_factor)}
        is_of_longrope = len(counts) == 1 and 0 not in counts
        if is_of_longrope != (kind == "longrope") or len(counts) > 1:
            errors.append(
                f"short_factor of {len(self.short_factor)} numbers and long_factor of "
                f"{len(self.long_factor)} must be of as many, one for each pair, with "
                f"rope_type='longrope', and empty with another ({kind!r})"
            )
        if not all(0 < x < math.inf for x in (*self.short_factor, *self.long_factor)):
            errors.append("short_factor and long_factor must be numbers above 0")
        for low, high in (
            ("low_freq_factor", "high_freq_factor"),
            ("beta_slow", "beta_fast"),
        ):
            least = getattr(self, low)
            most = getattr(self, high)
            if not 0 < least < most:
                errors.append(f"{low}={least} must be above 0 and below {high}={most}")
        if not 0 <= self.attention_factor < math.inf:
            errors.append(
                f"attention_factor={self.attention_factor} must be above 0, or 0 for "
                "the formula's"
            )
        if not 0 <= self.query_scale < math.inf:
            errors.append(f"query_scale={self.query_scale} must be at least 0")
        if errors:
            raise ValueError("; ".join(errors))

    def frequencies(self, head_dim: int, theta: float, tokens: int = 0) -> np.ndarray:
        """Returns radians per token of each pair, (D / 2,) float64.

        tokens: of a row, or of a cache's slots; only longrope asks.

        Raises:
          ValueError: ntk for a single pair, which has no base.
        """
        plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
        if self.rope_type == "linear":
            return plain / self.factor
        if self.rope_type == "ntk":
            if head_dim == 2:
                raise ValueError(f'rope_type="ntk" needs {head_dim=} above 2')
            return plain * self.factor ** -(np.arange(0, head_dim, 2) / (head_dim - 2))
        if self.rope_type == "longrope":
            is_long = tokens > self.original_max_position_embeddings
            factors = self.long_factor if is_long else self.short_factor
            return plain / np.array(factors)
        if self.rope_type == "yarn":
            kept = 1 - self._yarn_ramp(head_dim, theta)
        elif self.rope_type == "llama3":
            rotated = self.original_max_position_embeddings * plain / (2 * math.pi)
            span = self.high_freq_factor - self.low_freq_factor
            kept = np.clip((rotated - self.low_freq_factor) / span, 0, 1)
        else:
            return plain
        return kept * plain + (1 - kept) * plain / self.factor

    def magnitude(self) -> float:
        """Returns the factor on queries and keys each."""
        if self.rope_type not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor:
            return self.attention_factor
        if self.rope_type == "yarn":
            return 0.1 * math.log(self.factor) + 1
        original = self.original_max_position_embeddings
        return math.sqrt(1 + math.log(self.factor) / math.log(original))

    def _yarn_ramp(self, head_dim: int, theta: float) -> np.ndarray:
        """Returns how far each pair is interpolated, from 0 to 1: (D / 2,) float64."""

        def pair(rotated: float) -> float:
            """Returns the pair that rotates so often in the original context."""
            wavelength = self.original_max_position_embeddings / rotated
            return (
                head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))
            )

        first = pair(self.beta_fast)
        last = pair(self.beta_slow)
        if self.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        first = max(first, 0)
        last = min(last, head_dim - 1)
        width = max(last - first, 0.001)  # above 0 where both ends are one pair
        return np.clip((np.arange(head_dim // 2) - first) / width, 0, 1)


class Rope(NamedTuple):
    """RoPE of a layer: the base of its frequencies, and what is done to these."""

    theta: float
    scaling: RopeScaling


def rotations(
    positions: jax.Array,
    head_dim: int,
    theta: float,
    scaling: RopeScaling = RopeScaling(),
    tokens: int = 0,
) -> Rotation:
    """Returns the rotation of every token.

    positions: int32 (B, T), below 2³⁰.
    head_dim: D, even.
    theta: base of the geometric series of frequencies.
    scaling: what is done to these; cosine and sine carry its magnitude.
    tokens: of a row, or of the cache that it goes on from; 0 for T.

    A float32 product position · frequency is off by 0.03 radians at a million tokens.
    Here angles are whole numbers of 2⁻³² circles, so that whole circles overflow, and
    the position is split into digits in base 1024, whose units are reduced to
    fractions of a circle in float64: the error stays below 10⁻⁵ radians.
    """
    tokens = tokens or positions.shape[-1]
    frequencies = scaling.frequencies(head_dim, theta, tokens)
    angles = jnp.zeros((*positions.shape, head_dim // 2), jnp.uint32)  # (B, T, D / 2)
    for digit in range(3):
        circles = np.float64(_DIGIT**digit) * frequencies / (2 * np.pi)  # (D / 2,)
        unit = np.round(np.remainder(circles, 1) * 2**32).astype(np.uint64)
        value = (positions // _DIGIT**digit % _DIGIT).astype(jnp.uint32)
        angles += value[..., None] * unit.astype(np.uint32)
    signed = jax.lax.bitcast_convert_type(angles, jnp.int32).astype(jnp.float32)
    angle = signed * np.float32(2 * np.pi / 2**32)
    size = np.float32(scaling.magnitude())
    cosine = size * jnp.cos(angle)[:, :, None]
    sine = size * jnp.sin(angle)[:, :, None]
    if not scaling.query_scale:
        return Rotation(cosine, sine)
    periods = positions // scaling.original_max_position_embeddings  # (B, T)
    factor = 1 + np.float32(scaling.query_scale) * jnp.log1p(periods.astype("float32"))
    return Rotation(cosine, sine, factor[:, :, None, None])


def rotate(x: jax.Array, rotation: Rotation | None) -> jax.Array:
    """Rotates the pairs (i, i + D/2) of each head, as in Hugging Face's LLaMA.

    x: (B, T, H, D), of which later sizes than the rotation's D stay, or all without
      one; returns the same shape and type, computed in float32.
    """
    if rotation is None:
        return x
    cosine, sine, _ = rotation
    rotary = 2 * cosine.shape[-1]
    if rotary < x.shape[-1]:
        rotated = rotate(x[..., :rotary], rotation)
        return jnp.concatenate([rotated, x[..., rotary:]], axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    halves = [first * cosine - second * sine, second * cosine + first * sine]
    return jnp.concatenate(halves, axis=-1).astype(x.dtype)


def rotate_queries(q: jax.Array, rotation: Rotation | None) -> jax.Array:
    """Rotates queries as `rotate`, and multiplies them by their factor, if any."""
    q = rotate(q, rotation)
    if rotation is None or rotation.query_factor is None:
        return q
    return (q * rotation.query_factor).astype(q.dtype)
