"""Arrays on disk that are read as they are asked for, and never mapped.

Where a mapped file shrinks, or its disk fails, a process ends with SIGBUS and without a
word. A read that comes short, or fails, is an error like any other.
"""

import os
import weakref
from math import prod
from pathlib import Path

import numpy as np

_BYTES_AT_A_TIME = 1 << 20


class StoredArray:
    """Rows of numbers, one after the other in a file; threads may share it.

    path: of the file, which stays open as long as the array lives.
    dtype: of the numbers, little-endian. shape: (rows, ...).
    """

    def __init__(
        self, path: Path, dtype: np.dtype, shape: tuple[int, ...], offset: int = 0
    ):
        """Opens the file.

        offset: bytes before the first row.

        Raises:
          OSError: it cannot be opened.
        """
        self.path, self.shape = path, shape
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._offset = offset
        self._row_bytes = self.dtype.itemsize * prod(shape[1:])
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return self.size * self.dtype.itemsize

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Reads these rows, which follow each other.

        Raises:
          OSError: they cannot be read, or were removed.
        """
        begin, end, _ = rows.indices(self.shape[0])
        found = np.empty((max(end - begin, 0), *self.shape[1:]), self.dtype)
        return self._fill(found, begin)

    def take(self, places: np.ndarray) -> np.ndarray:
        """Reads the rows at places, int of any shape: (*that shape, *a row's).

        Fastest where places do not decrease. What lies between them is read too, but
        little of it is in memory at a time.

        Raises:
          OSError: as above.
        """
        flat, order = places.reshape(-1), None
        if (flat[1:] < flat[:-1]).any():
            order = np.argsort(flat, kind="stable")
            flat = flat[order]
        found = np.empty((flat.size, *self.shape[1:]), self.dtype)
        rows, done = max(_BYTES_AT_A_TIME // self._row_bytes, 1), 0
        span = int(flat[-1] - flat[0]) + 1 if flat.size else 0
        buffer = np.empty((min(rows, span), *self.shape[1:]), self.dtype)
        while done < flat.size:
            begin = int(flat[done])
            until = int(np.searchsorted(flat, begin + rows))
            near = flat[done:until] - begin
            where = slice(done, until) if order is None else order[done:until]
            found[where] = self._fill(buffer[: near[-1] + 1], begin)[near]
            done = until
        return found.reshape(*places.shape, *self.shape[1:])

    def _fill(self, found: np.ndarray, begin: int) -> np.ndarray:
        """Reads rows from `begin` on into an array, and gives it back."""
        wanted, done = found.reshape(-1).view(np.uint8), 0
        first = self._offset + begin * self._row_bytes
        while done < wanted.size:
            count = os.preadv(self._file, [wanted[done:]], first + done)
            if not count:
                raise OSError(
                    f"{self.path} ends at byte {first + done} and was longer when it "
                    "was opened: it was cut short while it was read; copy it again"
                )
            done += count
        return found
