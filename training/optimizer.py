"""AdamW with clipping, decay of the matrices only, warm-up and a cosine."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
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
        steps, warmup = self.total_steps, self.warmup_steps
        finite = "a finite number of at least 0"
        share = "from 0 to below 1"
        required = {
            f"peak_lr={self.peak_lr} must be a finite rate above 0": (
                0 < self.peak_lr < math.inf
            ),
            f"end_lr={self.end_lr} must be from 0 to peak_lr={self.peak_lr}: a cosine "
            "falls to it": 0 <= self.end_lr <= self.peak_lr,
            f"total_steps={steps} must be at least 1": steps > 0,
            f"warmup_steps={warmup} total_steps={steps}: the warm-up must end before "
            "the run does; lower warmup_steps (0 is allowed) or raise total_steps": (
                0 <= warmup < max(steps, 1)
            ),
            f"weight_decay={self.weight_decay} must be {finite}": (
                0 <= self.weight_decay < math.inf
            ),
            f"beta1={self.beta1} must be {share}": 0 <= self.beta1 < 1,
            f"beta2={self.beta2} must be {share}": 0 <= self.beta2 < 1,
            f"epsilon={self.epsilon} must be a small number above 0": (
                0 < self.epsilon < math.inf
            ),
            f"clip_norm={self.clip_norm} must be above 0; inf turns clipping off": (
                self.clip_norm > 0
            ),
        }
        wrong = [message for message, is_met in required.items() if not is_met]
        if wrong:
            raise ValueError("; ".join(wrong))


@dataclass(frozen=True)
class Optimizer:
    """Makes updates by an optax transformation, of all parameters at once."""

    transformation: optax.GradientTransformation

    def init(self, params: Any) -> Any:
        """Returns the state before the first update."""
        return self.transformation.init(params)

    def update(
        self, grads: Any, state: Any, params: Any, is_good: jax.Array | bool = True
    ) -> tuple[Any, Any]:
        """Returns the new parameters and state; the old ones where not `is_good`."""
        updates, new_state = self.transformation.update(grads, state, params)
        new_params = optax.apply_updates(params, updates)
        # Chosen where it is written: with the old state donated, no copy is made.
        return jax.tree.map(
            lambda new, old: jnp.where(is_good, new, old),
            (new_params, new_state),
            (params, state),
        )

    def axes(self, state: Any, axes: Any) -> Any:
        """Returns the names of the axes of every leaf of a state, None for no name.

        state: shapes, as of `init`. axes: names of the parameters' axes.
        """
        named = jax.tree_util.tree_leaves_with_path(axes, is_leaf=_is_tuple)
        names = {_keys(path): leaf for path, leaf in named}

        def of(path: tuple[Any, ...], leaf: Any) -> tuple[str | None, ...]:
            keys = _keys(path)
            ends = (keys[start:] for start in range(len(keys)))
            return next(filter(None, map(names.get, ends)), (None,) * leaf.ndim)

        return jax.tree_util.tree_map_with_path(of, state)


def _is_tuple(x: Any) -> bool:
    return isinstance(x, tuple)


def _keys(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Returns the dict keys of a path: a state has those of its parameters, last."""
    return tuple(k.key for k in path if isinstance(k, jax.tree_util.DictKey))


def make_optimizer(
    settings: OptimizerSettings,
) -> tuple[Optimizer, optax.Schedule]:
    """Builds clipping by global norm, then AdamW, and the schedule it follows.

    All matrices are decayed, the embedding table too, as in LLaMA, nanoGPT and MaxText.
    Norm scales, biases and sinks are not: see `decayed`.

    Args:
      settings: checked values.

    Returns:
      The optimizer, and the learning rate as a function of the number of updates
      already made (0 for the first one), for the log.
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
    of_all = optax.GradientTransformation(transformation.init, update)
    return Optimizer(of_all), schedule


def decayed(params: Any) -> Any:
    """Returns for each parameter whether weight decay applies.

    Layers are stacked, so a norm scale is (layers, E) and the number of axes does not
    separate it from a matrix; the name does: it ends in "scale", "bias" or "sinks".

    Args:
      params: nested dict of arrays.

    Returns:
      The same tree with a bool at each leaf.
    """

    def is_decayed(path: tuple[Any, ...], _: Any) -> bool:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return not name.endswith(("scale", "bias", "sinks"))

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def _in_standard_promotion[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Lets optax mix its int32 step count with floats under strict promotion."""

    @functools.wraps(function)
    def promoted(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return promoted
