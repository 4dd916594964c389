"""A pack as one local file: how a tenant or a prefix is carried from one cluster to another.

Written beside its name and renamed into place once it is whole and on disk, so that a file of that name is
always complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cedar.kvstore.packs import BadPack, PackReader, PackWriter


@contextmanager
def writing(path: Path) -> Iterator[PackWriter]:
    """A writer of the pack ``path``; nothing is left behind when the body fails. OSError."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(scratch, "wb", buffering=1 << 20) as file:
            os.chmod(scratch, 0o600)
            writer = PackWriter(file)
            yield writer
            writer.finish()
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def reading(path: Path) -> Iterator[PackReader]:
    """A reader of the pack ``path``. BadPack (with the path), OSError."""
    fd = os.open(path, os.O_RDONLY)
    try:
        try:
            yield PackReader(lambda offset, length: os.pread(fd, length, offset), os.fstat(fd).st_size)
        except BadPack as error:
            raise BadPack(f"{path}: {error}") from None
    finally:
        os.close(fd)
