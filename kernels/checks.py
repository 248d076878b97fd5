"""Checks of the arguments of public functions, before anything is computed.

All raise a ValueError that names what is wrong, and what would do. Values are checked
where they are known while tracing.
"""

import math
import operator
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.sharding import Mesh

from .placement import whole_rows
from .precision import accumulator_type
from .visible import Array, Visible

TYPES = "float16", "bfloat16", "float32", "float64"
LEAST = float(np.finfo("f4").tiny)
MOST = float(np.finfo("f4").max)
"""Normal float32 numbers: kernels compute scores in it."""

Shaped = jax.Array | jax.ShapeDtypeStruct


def known(array: Array | int) -> np.ndarray | None:
    """Returns the values of an array, or None where they are not known, as under `jit`.

    Waits for an array that is still computed. Returns None for an array of which other
    processes hold a part.
    """
    if isinstance(array, jax.core.Tracer):
        return None
    is_here = getattr(array, "is_fully_addressable", True)
    return np.asarray(array) if is_here else None


def _known_or_traced(array: Array) -> Array:
    values = known(array)
    return array if values is None else values


def whole_number(name: str, value: int, least: int) -> int:
    """Checks a number of tokens, devices or the like, and returns it.

    Raises:
      ValueError: names the argument: `value` is not a whole number that is known while
        tracing, or is below `least`.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:  # and where it is traced
        number = None
    if number is None:
        raise ValueError(
            f"{name} must be a whole number, and known while tracing, got {value!r:.60}"
        )
    if number < least:
        raise ValueError(f"{name}={number} must be at least {least}")
    return number


def check_signed(name: str, array: Array) -> None:
    if not jnp.issubdtype(array.dtype, jnp.signedinteger):
        raise ValueError(f"{name} must be signed integers, got {array.dtype}")


def checked_length(name: str, length: int | Array) -> int | Array:
    """Returns one number, or (B, 1) of them, and checks them where they are known."""
    if not isinstance(length, Array):
        return whole_number(name, length, 0)
    check_signed(name, length)
    if length.ndim and length.shape[1:] != (1,):
        raise ValueError(
            f"{name} must be one number, or (B, 1) for one in each row, got "
            f"{length.shape}: give (B,) as lengths[:, None]"
        )
    values = known(length)
    if values is not None and values.size:
        whole_number(name, int(values.min()), 0)
    return length


def check_covered(index: Array, keys: int, ids: int | None = None) -> None:
    """Refuses negative indices, and fewer ids than tokens."""
    tokens = max(keys, index.shape[1])
    values = known(index)
    if values is not None and values.size:
        whole_number("the first query index", int(values.min()), 0)
        tokens = max(tokens, int(values.max()) + 1)
    if ids is not None and tokens > ids:
        raise ValueError(
            f"document ids must cover the sequence of {tokens} tokens, got {ids} ids: "
            "give every token one, padding that of the last document"
        )


def checked_ids(ids: Array) -> Array:
    if not isinstance(ids, jax.Array):
        ids = np.asarray(ids)
    if ids.ndim not in (1, 2):
        raise ValueError(f"document ids must be (T,) or (B, T), got {ids.shape=}")
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"document ids must be integers, got {ids.dtype}")
    values = known(ids)
    if values is not None:
        values = np.atleast_2d(values)
        falls = np.argwhere(values[:, 1:] < values[:, :-1])  # (row, token)
        if len(falls):
            row, token = falls[0].tolist()
            raise ValueError(
                f"document ids must not decrease: row {row} has "
                f"{values[row, token]} at {token} and {values[row, token + 1]} after "
                "it; number the documents of a row in the order in which they come"
            )
    return ids[None] if ids.ndim == 1 else ids


def check_operands(q: Shaped, k: Shaped, v: Shaped) -> None:
    """Checks that q (B, T, H, D), k and v (B, S, K, D) are an attention problem."""
    if not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in (q, k, v)):
        kinds = ", ".join(type(x).__name__ for x in (q, k, v))
        raise ValueError(f"q, k and v must be arrays, got {kinds}")
    shapes = f"{q.shape=}, {k.shape=}, {v.shape=}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q, k and v must be (B, T, H, D), got {shapes}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape, got {shapes}")
    if 0 in (*q.shape, *k.shape):
        raise ValueError(f"q, k and v must not be empty, got {shapes}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"batch and head size of q and k must agree, got {shapes}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"query heads H={q.shape[2]} must be a multiple of key/value heads "
            f"K={k.shape[2]}, got {shapes}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v must have one type, got {q.dtype}, {k.dtype}, {v.dtype}: cast "
            "them to the one that the matrix products should use"
        )
    if q.dtype.name not in TYPES:
        types = f"{', '.join(TYPES[:-1])} or {TYPES[-1]}"
        raise ValueError(f"q, k and v must be {types}, got {q.dtype}")


def checked_scale(scale: float | None, head_size: int) -> float:
    """Returns the factor on the scores, 1/sqrt(D) unless given: finite in float32."""
    if scale is None:
        return head_size**-0.5
    number = _known_number(scale)
    if not abs(number) <= MOST:
        raise ValueError(
            "scale must be one finite number that is known while tracing, at most "
            f"{MOST:.4g} (float32), got {scale!s:.60}: multiply q by one that "
            "is not"
        )
    return number


def _known_number(value: Any) -> float:
    """Returns one number; nan for anything else, and where it is traced."""
    try:
        is_one = np.ndim(value) == 0 and not isinstance(value, bool | str | bytes)
        return float(value) if is_one else math.nan
    except (TypeError, ValueError):
        return math.nan


def checked_soft_cap(soft_cap: float | None) -> float | None:
    """Returns the cap on the scores, if any: above 0, and normal in float32."""
    if soft_cap is None:
        return None
    number = _known_number(soft_cap)
    if not LEAST <= number <= MOST:
        raise ValueError(
            "soft_cap must be one finite number above 0 that is known while tracing, "
            f"from {LEAST:.4g} to {MOST:.4g} (float32), or None for no "
            f"cap, got {soft_cap!s:.60}"
        )
    return number


def checked_sinks(sinks: jax.Array | None, q: Shaped) -> jax.Array | None:
    """Returns the logits of the sinks, (H,), in the type of lse."""
    if sinks is None:
        return None
    shape = np.shape(sinks)
    dtype = jnp.result_type(sinks)
    if shape != (q.shape[2],) or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"sinks must be floating-point logits ({q.shape[2]},), one for each of the "
            f"query heads of {q.shape=}, got {dtype} {shape}"
        )
    return jnp.asarray(sinks, accumulator_type(q.dtype))


def check_visible(q: jax.Array, visible: Visible) -> Visible:
    """Returns bounds of q (B, T, H, D): signed, (B or 1, T) or (m, B or 1, T)."""
    is_pair = isinstance(visible, tuple) and len(visible) == 2
    if not is_pair or not all(isinstance(bound, Array) for bound in visible):
        kind = getattr(visible, "__name__", type(visible).__name__)
        raise ValueError(
            "visible must be a mask, as causal() with its parentheses, or (for a cache "
            f"always) Visible of two arrays, got {kind}"
        )
    k_start, k_end = visible
    if k_start.shape[-2:] not in (q.shape[:2], (1, q.shape[1])):
        _refuse_shapes(k_start, k_end, f" for {q.shape=},")
    return _checked_pair(k_start, k_end)


def _checked_pair(k_start: Array, k_end: Array) -> Visible:
    """Returns bounds whose shapes and types are those of bounds."""
    is_one = k_start.ndim == 2 or (k_start.ndim == 3 and len(k_start) > 0)
    if not is_one or k_end.shape != k_start.shape:
        _refuse_shapes(k_start, k_end)
    check_signed("visible bounds k_start", k_start)
    check_signed("visible bounds k_end", k_end)
    return Visible(k_start, k_end)


def _refuse_shapes(k_start: Array, k_end: Array, operands: str = "") -> NoReturn:
    raise ValueError(
        "visible bounds must be (B, T) or (1, T), or those of m intervals, (m, B "
        f"or 1, T),{operands} got {k_start.shape=} and {k_end.shape=}"
    )


def checked_bounds(
    q: jax.Array, visible: Visible, num_keys: int, index: np.ndarray | None = None
) -> Visible:
    """Returns bounds as JAX arrays, clipped to [0, num_keys].

    That they do not decrease, and share no keys, is checked where values are known.

    index: of each query in the sequence, (T,), where they are not in order.
    """
    visible = check_visible(q, visible)
    visible = visible.map(lambda bound: clipped(bound, num_keys))
    if all(isinstance(bound, np.ndarray) for bound in visible):
        check_increasing(visible, index)
    return visible.map(jnp.asarray)


def clipped(bound: Array, num_keys: int) -> Array:
    """Clips a bound to [0, num_keys]: int32, and in NumPy where it is known."""
    values = known(bound)
    if values is not None:
        # Wide first: narrow ones cannot count the keys, and int32 would wrap around.
        return values.astype(np.int64).clip(0, num_keys).astype(np.int32)
    if bound.dtype.itemsize < 4:
        bound = bound.astype(jnp.int32)
    return jnp.clip(bound, 0, num_keys).astype(jnp.int32)


def are_wrong(visible: Visible) -> tuple[Array, ...]:
    """Returns where bounds in natural order decrease or share keys: bool (B or 1,)."""
    bounds = visible.intervals().map(whole_rows)
    decreases = ((x[..., 1:] < x[..., :-1]).any(axis=(0, 2)) for x in bounds)
    return *decreases, bounds.share_keys().any(axis=-1)


def check_increasing(visible: Visible, index: np.ndarray | None = None) -> None:
    """Checks that bounds do not decrease along the sequence, also while tracing.

    And that the intervals of a query share no key, which would count twice.
    `attention` and `make_ring_attention` do where values are known. Under `jit` they do
    not, and such bounds give wrong results. This makes it an error there too:
    call it in a function, and pass that to `checkify.checkify`. For a ring see also
    `make_ring_attention(..., check_masks=True)`.

    visible: bounds (B or 1, T) or (m, B or 1, T).
    index: of each query in the sequence, (T,), where they are not in order, as on a
      ring (`layout.order`).

    Raises:
      ValueError: shapes or types are not those of bounds, or known bounds decrease,
        share keys or end before they start: names the first place.
    """
    bounds = _checked_pair(visible.k_start, visible.k_end).map(_known_or_traced)
    bounds = bounds.intervals().map(whole_rows)
    if index is not None:
        # From layout order to the sequence's: in another they may well decrease.
        bounds = bounds.map(lambda bound: bound[..., np.argsort(index)])
    # Masks never end before they start at the first token: these were swapped.
    ends_before = (bounds.k_end < bounds.k_start).all(axis=(0, 2))
    _refuse(
        ends_before[:, None],
        "visible bounds must be (k_start, k_end), got k_end below k_start for every "
        "query of row {row}: are they swapped?",
    )
    for name, bound in bounds._asdict().items():
        name += " of " if len(bound) == 1 else " of interval {interval} of "
        _refuse(
            bound[..., 1:] < bound[..., :-1],
            f"visible bounds must not decrease along the sequence, got {name}"
            "row {row}: {before} at {place} and {after} after it",
            before=bound[..., :-1],
            after=bound[..., 1:],
        )
    if len(bounds.k_start) > 1:
        _refuse(
            bounds.share_keys(),
            "the intervals of a query must share no key, got one in two of them for "
            "the query at {place} of row {row}: join them with |",
        )


def _refuse(is_wrong: Array, message: str, **values: Array) -> None:
    """Raises an error at the first wrong place, also while tracing: see above.

    is_wrong, values: (B or 1, T) or (m, B or 1, T).
    """
    if is_wrong.size == 0:
        return
    at = divmod(is_wrong.argmax(), is_wrong.shape[-1])
    where: dict[str, Any] = dict(zip(("row", "place"), at, strict=True))
    where |= {name: x.reshape(-1)[is_wrong.argmax()] for name, x in values.items()}
    where["interval"], where["row"] = divmod(where["row"], is_wrong.shape[-2])
    if not isinstance(is_wrong, np.ndarray):
        checkify.check(jnp.all(~is_wrong), message, **where)
    elif is_wrong.any():
        raise ValueError(message.format(**where))


class Axes(NamedTuple):
    """Mesh axes of the ring, of the batch, and of the heads and Ulysses if any."""

    ring: tuple[str, ...]
    batch: tuple[str, ...]
    heads: str | None
    ulysses: str | None = None

    @property
    def tokens(self) -> tuple[str, ...]:
        """Axes of the sequence: shards of the ring, and slices of each shard."""
        return self.ring if self.ulysses is None else (*self.ring, self.ulysses)


def checked_axes(
    mesh: Mesh,
    ring_axes: str | tuple[str, ...],
    batch_axes: str | tuple[str, ...] | None,
    head_axis: str | tuple[()] | None,
    ulysses_axis: str | None = None,
) -> Axes:
    """Returns the axes that the sequence, the batch and the heads are sharded over.

    batch_axes, head_axis: () for none; None for those of "data" and "fsdp", and
      "tensor", that the mesh has and the sequence does not use.
    """
    ring = (ring_axes,) if isinstance(ring_axes, str) else tuple(ring_axes)
    rest = [axis for axis in mesh.axis_names if axis not in (*ring, ulysses_axis)]
    if batch_axes is None:
        batch_axes = tuple(axis for axis in ("data", "fsdp") if axis in rest)
    batch = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
    if head_axis is None and "tensor" in rest and "tensor" not in batch:
        head_axis = "tensor"
    # From here on None is no axis: () was that, and None stood for the default.
    axes = Axes(ring, batch, head_axis or None, ulysses_axis)
    if missing := [axis for axis in ring if axis not in mesh.axis_names]:
        raise ValueError(
            f"the mesh {dict(mesh.shape)} has no axis {missing[0]!r}: name the axis of "
            'the sequence, as in ring_axes="context", or ring_axes=() for none'
        )
    named = *axes.tokens, *batch, *((head_axis,) if head_axis else ())
    if not set(named) <= set(mesh.axis_names) or len(set(named)) < len(named):
        ulysses = "" if ulysses_axis is None else f", {ulysses_axis=}"
        raise ValueError(
            f"ring_axes={ring}, batch_axes={batch} and {head_axis=}{ulysses} must be "
            f"different axes of the mesh {dict(mesh.shape)}"
        )
    return axes


def check_order(mesh: Mesh, ring_axes: tuple[str, ...]) -> None:
    """Checks that the axes are in the order of the mesh."""
    in_order = tuple(axis for axis in mesh.axis_names if axis in ring_axes)
    if ring_axes != in_order:
        raise ValueError(
            f"ring_axes must be in the order of the mesh, {in_order}, got {ring_axes}"
        )


def check_shards(
    what: str, letter: str, size: int, axes: tuple[str, ...], mesh: Mesh
) -> None:
    """Checks that a count divides over these axes."""
    shards = math.prod(mesh.shape[axis] for axis in axes)
    if size % shards:
        raise ValueError(
            f"{size} {what} do not divide over the mesh's {' x '.join(axes)} axis of "
            f"{shards}: make that axis a divisor of {letter}"
        )
