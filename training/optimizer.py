"""AdamW with clipping, decay of the matrices only, warm-up and a cosine."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax


@dataclass(frozen=True)
class OptimizerSettings:
    """Everything `make_optimizer` needs; the defaults are LLaMA's (arXiv 2302.13971).

    Attributes:
      peak_lr: learning rate at the end of the warm-up.
      end_lr: learning rate at `total_steps` and for ever after.
      warmup_steps: steps of the linear rise from 0 to `peak_lr`; 0 starts at the peak.
      total_steps: step at which the cosine reaches `end_lr`, the warm-up included.
      weight_decay: decoupled decay of every matrix, scaled by the learning rate.
      beta1: decay of the first moment.
      beta2: decay of the second moment.
      epsilon: added to the root of the second moment.
      clip_norm: largest global gradient norm; `math.inf` turns clipping off.

    Raises:
      ValueError: for a value outside its range. NaN is outside every range.
    """

    peak_lr: float
    end_lr: float
    warmup_steps: int
    total_steps: int
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        _require(self.peak_lr > 0, f"{self.peak_lr=}: give a rate above 0")
        _require(
            0 <= self.end_lr <= self.peak_lr,
            f"{self.end_lr=} {self.peak_lr=}: the cosine falls from peak_lr to end_lr;"
            " give an end_lr from 0 to peak_lr",
        )
        _require(self.total_steps > 0, f"{self.total_steps=}: give at least 1 step")
        _require(
            0 <= self.warmup_steps < self.total_steps,
            f"{self.warmup_steps=} {self.total_steps=}: the warm-up must end before the"
            " run does; lower warmup_steps (0 is allowed) or raise total_steps",
        )
        _require(self.weight_decay >= 0, f"{self.weight_decay=}: give 0 to turn it off")
        _require(0 <= self.beta1 < 1, f"{self.beta1=}: give a value from 0 to below 1")
        _require(0 <= self.beta2 < 1, f"{self.beta2=}: give a value from 0 to below 1")
        _require(self.epsilon > 0, f"{self.epsilon=}: give a small value above 0")
        _require(
            self.clip_norm > 0, f"{self.clip_norm=}: give math.inf to turn clipping off"
        )


def make_optimizer(
    settings: OptimizerSettings,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Builds clipping by global norm, then AdamW, and the schedule it follows.

    All matrices are decayed, the embedding table too, as in LLaMA, nanoGPT and MaxText.
    Norm scales and biases are not: see `decayed`.

    Args:
      settings: checked values.

    Returns:
      The gradient transformation, and the learning rate as a function of the number of
      updates already made (0 for the first one), for the log.
    """
    schedule = _in_standard_promotion(
        optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=settings.peak_lr,
            warmup_steps=settings.warmup_steps,
            decay_steps=settings.total_steps,
            end_value=settings.end_lr,
        )
    )
    transformation = optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(
            schedule,
            b1=settings.beta1,
            b2=settings.beta2,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            mask=decayed,
        ),
    )
    update = _in_standard_promotion(transformation.update)
    return optax.GradientTransformation(transformation.init, update), schedule


def decayed(params: Any) -> Any:
    """Says for each parameter whether weight decay applies.

    Layers are stacked, so a norm scale is (layers, E) and the number of axes does not
    tell it from a matrix; the name does: it ends in "scale" (or "bias").

    Args:
      params: nested dict of arrays.

    Returns:
      The same tree with a bool at each leaf.
    """

    def is_decayed(path: tuple[Any, ...], _: Any) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return not name.endswith(("scale", "bias"))

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def _in_standard_promotion[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Lets optax mix its int32 step count with floats under strict promotion."""

    @functools.wraps(function)
    def promoted(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return promoted


def _require(is_met: bool, message: str) -> None:
    if not is_met:
        raise ValueError(message.replace("self.", ""))
