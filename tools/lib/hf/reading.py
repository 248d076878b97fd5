"""Reads the tensors of published models onto a mesh."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from data.progress import progress
from models.abstract import Model
from tasks.state import abstract_parameters
from tools.lib.hf.names import EMBEDDING, HEAD, Index, Weight, stored_shapes
from tools.lib.hf.tensor_files import TensorFiles
from training.sharding.mesh import Partition

LISTED = 4
"""Differences between a model and its files that are reported."""
ROWS = 4096
"""Of an embedding that are compared at a time."""


def load(
    files: TensorFiles,
    weights: Sequence[Weight],
    model: Model,
    partition: Partition,
    config: str = "config.json",
) -> Any:
    """Reads the parameters onto the mesh, float32, each device's part on its own.

    Besides what the devices hold, the host holds one device's part of a parameter, and
    of a layer of that, as it is stored.

    config: file that says which tensors these are.

    Raises:
      ValueError: the files lack tensors or have others, or numbers that are not finite.
    """
    _check_tensors(files, weights, model, config)
    abstract = abstract_parameters(model.shapes, model.axes, partition)
    leaves = traverse_util.flatten_dict(abstract)
    parameters = {}
    count = sum(math.prod(leaves[weight.path].shape) for weight in weights)
    with progress(count, " parameters", "reading") as bar:
        for weight in weights:
            parameters[weight.path] = _read(files, weight, leaves[weight.path])
            bar.update(parameters[weight.path].size)
    return traverse_util.unflatten_dict(parameters)


def _check_tensors(
    files: TensorFiles, weights: Sequence[Weight], model: Model, config: str
) -> None:
    """Raises ValueError unless the files hold the model's tensors and no others."""
    wanted = stored_shapes(weights, model)
    # Older files hold tensors that follow from config.json.
    derived = "rotary_emb.inv_freq"
    stored = {n: s for n, s in files.shapes.items() if not n.endswith(derived)}
    if HEAD not in weights and _is_embedding(files, stored):
        del stored[HEAD.name]
    wrong = []
    for name in sorted(wanted.keys() | stored.keys()):
        there = stored.get(name)
        here = wanted.get(name)
        if there is None:
            wrong.append(f"{name} is missing, {list(here)} by {config}")
        elif here is None:
            wrong.append(f"{name} {list(there)} is not a tensor of this model")
        elif there != here:
            wrong.append(f"{name} is {list(there)}, but {list(here)} by {config}")
    if wrong:
        if len(wrong) > LISTED:
            wrong[LISTED:] = [f"and {len(wrong) - LISTED} more"]
        raise ValueError(
            f"the tensors are not those that {config} describes: " + "; ".join(wrong)
        )


def _is_embedding(files: TensorFiles, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Returns whether the files hold a tied head, which is that of the embedding.

    Raises:
      ValueError: it is another one.
    """
    if HEAD.name not in shapes or shapes[HEAD.name] != shapes.get(EMBEDDING.name):
        return False
    rows = shapes[HEAD.name][0]
    for start in range(0, rows, ROWS):
        index = slice(start, min(start + ROWS, rows)), slice(None)
        head = files.read(HEAD.name, index)
        table = files.read(EMBEDDING.name, index)
        if not _are_equal(head, table) and not _are_equal(table, head):
            raise ValueError(
                f"{HEAD.name} is not {EMBEDDING.name}, but config.json says "
                "tie_word_embeddings=True: set that to false to read both"
            )
    return True


def _are_equal(exact: np.ndarray, rounded: np.ndarray) -> bool:
    """Returns whether numbers are equal to others, as rounded to the type of those."""
    with np.errstate(over="ignore"):  # beyond float16: inf, which equals no finite one
        return np.array_equal(exact.astype(rounded.dtype, copy=False), rounded)


def _read(files: TensorFiles, weight: Weight, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Reads one parameter; what several devices hold is read once."""
    shape = leaf.shape
    sharding = leaf.sharding
    holders: dict[str, list[jax.Device]] = {}
    indices = sharding.addressable_devices_indices_map(shape)
    for device, index in indices.items():
        holders.setdefault(str(index), []).append(device)
    arrays = []
    for devices in holders.values():
        # Of its own memory, which a device of the host may keep as its own.
        part = np.empty(sharding.shard_shape(shape), np.float32)
        _fill(part, files, weight, shape, indices[devices[0]])
        # Waited for, so that parts do not wait for their devices in memory.
        arrays += jax.block_until_ready([jax.device_put(part, d) for d in devices])
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _fill(
    part: np.ndarray,
    files: TensorFiles,
    weight: Weight,
    shape: tuple[int, ...],
    index: Index,
) -> None:
    """Reads the part at `index` of a parameter of this shape, as float32."""
    stacked = weight.stacked
    # Of the layers, and of their experts, those that the part has.
    names = np.reshape(weight.names, shape[:stacked])[index[:stacked]]
    tensors = part.reshape(-1, *part.shape[stacked:])
    shape = shape[stacked:]
    own = index[stacked:]
    # In another order a part is not one piece of the tensor, which is read whole.
    wanted = (slice(None),) * len(own) if weight.order else own
    stored_index = weight.stored_index(shape, wanted)
    for tensor, name in zip(tensors, np.ravel(names), strict=True):
        stored = files.read(str(name), stored_index)
        if weight.order:
            tensor[...] = weight.from_stored(stored, shape)[own]
        else:
            tensor[...] = weight.from_stored(stored, tensor.shape)
        if not np.isfinite(tensor).all():
            raise ValueError(
                f"{name} holds numbers that are not finite, which no training recovers "
                "from: copy the model again"
            )
