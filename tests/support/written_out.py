"""Language models of every family, written out in float64."""

from typing import Any

import jax
import numpy as np

from data.batch import Batch
from models.rope import RopeScaling
from models.sizes import LanguageModelConfig


def rotated(
    x: np.ndarray, positions: np.ndarray, theta: float, scaling: RopeScaling
) -> np.ndarray:
    """x · cos + rotate_half(x) · sin, of heads (B, T, H, D), or their first numbers."""
    angles = positions[..., None] * scaling.frequencies(x.shape[-1], theta)
    cos, sin = (
        scaling.magnitude() * np.tile(f(angles), 2)[:, :, None]
        for f in (np.cos, np.sin)
    )
    first, second = np.split(x, 2, axis=-1)
    return x * cos + np.concatenate([-second, first], axis=-1) * sin


def capped(x: np.ndarray, cap: float) -> np.ndarray:
    return cap * np.tanh(x / cap) if cap else x


def gated(x: np.ndarray, activation: str) -> np.ndarray:
    if activation == "silu":
        return x / (1 + np.exp(-x))
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


class WrittenOut:
    """A model of these sizes and float64 parameters."""

    def __init__(self, sizes: LanguageModelConfig, parameters: Any):
        self.sizes = sizes
        self.parameters = jax.tree.map(np.float64, parameters)

    def norm(self, x: np.ndarray, weights: dict) -> np.ndarray:
        scale = weights["scale"] + self.sizes.norm_unit_offset
        axes = tuple(range(-scale.ndim, 0))
        mean_square = (x**2).mean(axis=axes, keepdims=True)
        return x / np.sqrt(mean_square + self.sizes.norm_epsilon) * scale

    def attention(self, x: np.ndarray, p: dict, kind: str, batch: Batch) -> np.ndarray:
        """Maps x (B, T, E) to the same shape."""
        sizes, has_window = self.sizes, kind in "wW"
        q, k, v = (
            np.einsum("bte,ehd->bthd", x, p[name]) + p.get(f"{name}_bias", 0)
            for name in ("query", "key", "value")
        )
        if sizes.qk_norm:
            q, k = self.norm(q, p["query_norm"]), self.norm(k, p["key_norm"])
        rope = sizes.rope_theta, sizes.rope_scaling
        if has_window and sizes.window_rope_theta:
            rope = sizes.window_rope_theta, RopeScaling()
        size = 0 if kind.isupper() else int(sizes.head_dim * sizes.rotary_fraction)
        q, k = (
            np.concatenate(
                [rotated(y[..., :size], batch.positions, *rope), y[..., size:]], axis=-1
            )
            for y in (q, k)
        )
        shared = sizes.num_heads // sizes.num_kv_heads
        k, v = (np.repeat(y, shared, axis=2) for y in (k, v))
        scale = sizes.attention_scale or sizes.head_dim**-0.5
        scores = scale * np.einsum("bthd,bshd->bhts", q, k)
        weights = np.exp(capped(scores, sizes.attention_soft_cap))
        index = np.arange(x.shape[1])
        seen = (batch.k_start[..., None] <= index) & (index < batch.k_end[..., None])
        if has_window:
            ahead = index - index[:, None]
            seen &= (-sizes.window < ahead) & (ahead <= 0)
        weights *= seen[:, None]
        total = weights.sum(axis=-1, keepdims=True)
        if sizes.attention_sinks:
            total += np.exp(p["sinks"])[:, None, None]
        weights /= np.maximum(total, 1e-300)
        out = np.einsum("bhts,bshd->bthd", weights, v)
        return np.einsum("bthd,hde->bte", out, p["output"]) + p.get("output_bias", 0)

    def layer(self, x: np.ndarray, number: int, batch: Batch) -> np.ndarray:
        """Maps x (B, T, E) to the same shape."""
        p = jax.tree.map(lambda stack: stack[number], self.parameters["layers"])
        pattern = self.sizes.layer_pattern or "f"
        kind = pattern[number % len(pattern)]

        def attention(y: np.ndarray) -> np.ndarray:
            return self.attention(y, p["attention"], kind, batch)

        def feed_forward(y: np.ndarray) -> np.ndarray:
            gate, up, down = (p["feed_forward"][n] for n in ("gate", "up", "down"))
            return (gated(y @ gate, self.sizes.activation) * (y @ up)) @ down

        for name, part in (("attention", attention), ("feed_forward", feed_forward)):
            before, after = p.get(f"{name}_norm"), p.get(f"{name}_post_norm")
            assert (before is not None) == (self.sizes.norms in ("before", "both"))
            assert (after is not None) == (self.sizes.norms in ("after", "both"))
            y = part(self.norm(x, before) if before else x)
            x = x + self.sizes.residual_scale * (self.norm(y, after) if after else y)
        return x

    def __call__(self, batch: Batch) -> tuple[np.ndarray, float]:
        """Hidden states (B, T, E), and the weighted sum of the losses."""
        sizes, table = self.sizes, self.parameters["embedding"]
        x = table[batch.tokens] * sizes.embedding_scale
        for number in range(sizes.num_layers):
            x = self.layer(x, number, batch)
        hidden = self.norm(x, self.parameters["norm"])
        assert ("head" in self.parameters) != sizes.tied_embeddings
        logits = sizes.logit_scale * (hidden @ self.parameters.get("head", table.T))
        logits = capped(logits, sizes.logit_soft_cap)
        chosen = np.take_along_axis(logits, batch.targets[..., None], axis=-1)[..., 0]
        losses = np.log(np.exp(logits).sum(axis=-1)) - chosen
        return hidden, float((batch.loss_weights * losses).sum())
