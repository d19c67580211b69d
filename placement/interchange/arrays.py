"""Reading `.npy` and `.npz` piece by piece: the rows of an array as they come, never the whole, and never a pickle."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from placement.errors import TraceError

MOST_BYTES_AT_ONCE = 1 << 33


@dataclass(slots=True, kw_only=True)
class ArrayStream:
    """An array of a file that is read from its first row to its last. source names file and key."""

    source: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    _file: IO[bytes]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape[1:])

    def take(self, num_rows: int) -> NDArray[Any]:
        """The next rows [n, ...]. Raises TraceError where the file ends too early."""
        wanted = num_rows * self.row_bytes
        try:
            data = self._file.read(wanted)
        except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise TraceError(f"{self.source}: cannot be read to its end: {error}") from error
        if len(data) != wanted:
            raise TraceError(
                f"{self.source}: truncated: {self.shape} {self.dtype} is declared, but the data ends early"
            )
        rows = np.frombuffer(data, self.dtype).reshape(num_rows, *self.shape[1:])
        return rows.astype(self.dtype.newbyteorder("="), copy=False)

    def rest(self) -> NDArray[Any]:
        """All that is left, for small arrays. Raises TraceError where it is larger than what fits."""
        if self.row_bytes * (self.shape[0] if self.shape else 1) > MOST_BYTES_AT_ONCE:
            raise TraceError(f"{self.source}: {self.shape} {self.dtype} is too large to be read at once")
        return self.take(self.shape[0]) if self.shape else self.take(1).reshape(())


def open_array(file: IO[bytes], source: str) -> ArrayStream:
    """Read the header of a `.npy` and stand before its data. Raises TraceError for what is none, or holds objects."""
    try:
        version = npy.read_magic(file)
        if version == (1, 0):
            shape, fortran, dtype = npy.read_array_header_1_0(file)
        elif version == (2, 0):
            shape, fortran, dtype = npy.read_array_header_2_0(file)
        else:
            raise TraceError(f"{source}: .npy version {version} is not known")
    except TraceError:
        raise
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, SyntaxError) as error:
        raise TraceError(f"{source}: not a readable .npy: {' '.join(str(error).split())[:160]}") from error
    if dtype.hasobject:
        raise TraceError(f"{source}: holds Python objects ({dtype}), which are never loaded; save plain numbers")
    if fortran and len(shape) > 1:
        raise TraceError(f"{source}: is in Fortran order; save it with np.ascontiguousarray")
    if len(shape) and min(shape) < 0:
        raise TraceError(f"{source}: has a negative size: {shape}")
    return ArrayStream(source=source, shape=shape, dtype=dtype, _file=file)


@contextmanager
def open_npz(path: Path) -> Iterator[zipfile.ZipFile]:
    """An `.npz` as the zip that it is. Raises TraceError that names the file."""
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        raise TraceError(f"trace '{path}': not a readable .npz: {' '.join(str(error).split())[:160]}") from error
    with archive:
        yield archive


def array_names(archive: zipfile.ZipFile) -> list[str]:
    return [name.removesuffix(".npy") for name in archive.namelist()]


def open_member(archive: zipfile.ZipFile, name: str, path: Path) -> ArrayStream:
    """One array of an `.npz`. Several can be read side by side."""
    source = f"trace '{path}': key '{name}'"
    members = archive.namelist()
    try:
        file = archive.open(f"{name}.npy" if f"{name}.npy" in members else name)
    except (OSError, EOFError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise TraceError(f"{source}: not a readable .npz: {error}") from error
    return open_array(file, source)
