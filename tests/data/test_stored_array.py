"""Rows at any places are those of the array that was written."""

import os

import numpy as np
import pytest

from data import stored_array
from data.stored_array import StoredArray

SEED = 20


@pytest.fixture(params=[(5000,), (700, 3), (300, 2, 4)], ids=str)
def written(request, tmp_path, monkeypatch):
    """An array, and the same on disk behind 16 bytes; read 512 bytes at a time."""
    monkeypatch.setattr(stored_array, "_BYTES_AT_A_TIME", 512)
    print(f"seed {SEED}")
    values = np.random.default_rng(SEED).normal(size=request.param).astype("<f4")
    (tmp_path / "file").write_bytes(b"16 bytes of this" + values.tobytes())
    dtype = np.dtype(np.float32)
    return values, StoredArray(tmp_path / "file", dtype, values.shape, offset=16)


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("shape", [(1,), (40,), (900,), (20, 2), (0,), (3, 0)])
def test_any_places_are_read(written, shape, is_sorted):
    values, stored = written
    places = np.random.default_rng(SEED).integers(0, len(values), shape)
    if is_sorted:
        places = np.sort(places, axis=None).reshape(shape)
    np.testing.assert_array_equal(stored.take(places), values[places])


def test_a_file_is_closed_when_nobody_has_it(tmp_path):
    (tmp_path / "file").write_bytes(bytes(8))
    stored = StoredArray(tmp_path / "file", np.dtype(np.uint8), (8,))
    number = stored._file
    assert os.fstat(number).st_size == 8
    del stored
    with pytest.raises(OSError):
        os.fstat(number)
