"""A bucket of this process, in the place of Google's."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from etils.epath import backend
from fsspec.implementations.memory import MemoryFileSystem


class Bucket(MemoryFileSystem):
    """Objects by path, without the bucket's scheme."""

    protocol, store, pseudo_dirs = ("gs", "gcs"), {}, [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(str(path).removeprefix("gs://"))


@contextlib.contextmanager
def in_memory() -> Iterator[dict]:
    """Keeps what is written to buckets, by path, until the block ends."""
    files = type(backend.fsspec_backend)
    place = mock.patch.object(files, "_get_filesystem", lambda *_: Bucket())
    with place, mock.patch.object(Bucket, "store", {}) as store:
        yield store
