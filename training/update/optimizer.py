"""AdamW, Adafactor or Muon with clipping, decay of matrices, warm-up and a cosine."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import optax
from jax.typing import ArrayLike

from training.update.at_once import AtOnce, Optimizer, standard_promotion
from training.update.layerwise import Layerwise, Storage, check_names, weights_of

OPTIMIZERS = "adamw", "adafactor", "muon"
SECOND_STACK = "delta_layers"
"""Layers of a hybrid that have Gated DeltaNet."""

Schedule = Callable[[ArrayLike], jax.Array]
"""Learning rate, a scalar, by updates made."""

MUON_RMS = 0.2
"""Root mean square of Muon's update before the learning rate: about that of AdamW's, so
that both take the same rates (2502.16982)."""


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
      name: "adamw"; "adafactor" (1804.04235), which keeps means of the squares over the
        rows and columns of a matrix, and no first moment; or "muon" (2502.16982) for
        the layers' matrices, with AdamW for all others.
      momentum: decay of Muon's moment.
      storage: how state and parameters are stored.

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
    name: str = "adamw"
    momentum: float = 0.95
    storage: Storage = field(default_factory=Storage)

    def __post_init__(self) -> None:
        check_names(self, {"name": OPTIMIZERS})
        steps = self.total_steps
        warmup = self.warmup_steps
        peak = self.peak_lr
        end = self.end_lr
        clip = self.clip_norm
        decay = self.weight_decay
        epsilon = self.epsilon
        share = "from 0 to below 1"
        required = {
            f"peak_lr={peak} must be a finite rate above 0": 0 < peak < math.inf,
            f"end_lr={end} must be from 0 to peak_lr={peak}: a cosine falls to it": (
                0 <= end <= peak
            ),
            f"total_steps={steps} must be at least 1": steps > 0,
            f"warmup_steps={warmup} total_steps={steps}: the warm-up must end before "
            "the run does; lower warmup_steps (0 is allowed) or raise total_steps": (
                0 <= warmup < max(steps, 1)
            ),
            f"weight_decay={decay} must be a finite number of at least 0": (
                0 <= decay < math.inf
            ),
            f"beta1={self.beta1} must be {share}": 0 <= self.beta1 < 1,
            f"beta2={self.beta2} must be {share}": 0 <= self.beta2 < 1,
            f"momentum={self.momentum} must be {share}": 0 <= self.momentum < 1,
            f"moments={self.storage.moments} must be float32 with name=adafactor, "
            "whose means of rows and columns are few": (
                self.name != "adafactor" or self.storage.moments == "float32"
            ),
            f"epsilon={epsilon} must be a small number above 0": 0 < epsilon < math.inf,
            f"clip_norm={clip} must be above 0; inf turns clipping off": clip > 0,
        }
        wrong = [message for message, is_met in required.items() if not is_met]
        if wrong:
            raise ValueError("; ".join(wrong))

    def schedule(self) -> Schedule:
        """Returns the learning rate as a function of the number of updates made."""
        rate = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.peak_lr,
            warmup_steps=self.warmup_steps,
            decay_steps=self.total_steps,
            end_value=self.end_lr,
        )
        # Optax types rates as numbers or arrays; those of a cosine are arrays.
        return cast(Schedule, standard_promotion(rate))


def make_optimizer(
    settings: OptimizerSettings, shapes: Any = None, axes: Any = None
) -> tuple[Optimizer, Schedule]:
    """Builds the optimizer that clips by global norm, and the schedule it follows.

    All matrices are decayed, the embedding table too, as in LLaMA, nanoGPT and MaxText.
    Norm scales, biases and sinks are not: see `decayed`.

    Args:
      settings: checked values.
      shapes, axes: of the parameters, and the names of their axes; what is not AdamW in
        float32 needs them.

    Returns:
      The optimizer, and the learning rate as a function of the number of updates
      already made (0 for the first one), for the log.

    Raises:
      ValueError: what is not AdamW in float32, for a model with two stacks of layers;
        or what is not AdamW, for one with experts.
    """
    schedule = settings.schedule()
    adamw = optax.adamw(
        schedule,
        b1=settings.beta1,
        b2=settings.beta2,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        mask=decayed,
    )
    storage = settings.storage
    # The seed aside, which is of rounding alone.
    if settings.name == "adamw" and storage == Storage(seed=storage.seed):
        clip = optax.clip_by_global_norm(settings.clip_norm)
        return AtOnce(optax.chain(clip, adamw)), schedule
    _check_stacks(settings, shapes)
    of_layer = {
        "adamw": adamw,
        "adafactor": _adafactor(settings, schedule),
        "muon": _muon(settings, schedule),
    }[settings.name]
    # Embeddings and the head take AdamW beside Muon, as in the paper.
    of_rest = adamw if settings.name == "muon" else of_layer
    weights = weights_of(shapes, axes, _is_decayed)
    if settings.name != "adamw" and any(w.is_stack for w in jax.tree.leaves(weights)):
        raise ValueError(
            f"name={settings.name!r} must be 'adamw' for a model with experts, each of "
            "whose parameters is a stack of matrices: set name=adamw"
        )
    clip_norm = settings.clip_norm
    return Layerwise(of_layer, of_rest, weights, storage, clip_norm), schedule


def _check_stacks(settings: OptimizerSettings, shapes: Mapping[str, Any]) -> None:
    """Refuses a model with two stacks of layers, of which `Layerwise` knows one."""
    if SECOND_STACK in shapes:
        raise ValueError(
            f"name={settings.name!r} with {settings.storage} goes through one stack of "
            f"layers, and this model has a second, {SECOND_STACK}: set name=adamw, "
            "moments and parameters to float32, and placement=device"
        )


def _adafactor(
    settings: OptimizerSettings, schedule: Schedule
) -> optax.GradientTransformation:
    """Builds Adafactor with the rates of AdamW: not scaled by those of the parameters.

    As for vision transformers (2106.04560), where it trains as well as AdamW does.
    """
    return optax.chain(
        # Every matrix is factored, whatever its sides.
        optax.scale_by_factored_rms(min_dim_size_to_factor=2),
        optax.clip_by_block_rms(1.0),
        optax.add_decayed_weights(settings.weight_decay, decayed),
        optax.scale_by_learning_rate(schedule),
    )


def _muon(
    settings: OptimizerSettings, schedule: Schedule
) -> optax.GradientTransformation:
    """Builds Muon for matrices, and AdamW for norms, biases and sinks beside them."""

    def sides(params: Any) -> Any:
        numbers = optax.contrib.MuonDimensionNumbers()  # inputs first, then outputs
        return jax.tree.map(
            lambda is_matrix: numbers if is_matrix else None, decayed(params)
        )

    return optax.contrib.muon(
        schedule,
        beta=settings.momentum,
        weight_decay=settings.weight_decay,
        adam_b1=settings.beta1,
        adam_b2=settings.beta2,
        muon_weight_dimension_numbers=sides,
        consistent_rms=MUON_RMS,
    )


def decayed(params: Any) -> Any:
    """Returns whether weight decay applies, for each parameter of a nested dict.

    Layers are stacked, so a norm scale is (layers, E) and the number of axes does not
    separate it from a matrix; the name does: it ends in "scale", "bias" or "sinks".
    """

    def of(path: tuple[Any, ...], _: Any) -> bool:
        return _is_decayed(jax.tree_util.keystr(path[-1:], simple=True))

    return jax.tree_util.tree_map_with_path(of, params)


def _is_decayed(name: str) -> bool:
    return not name.endswith(("scale", "bias", "sinks", "rate"))
