"""Reading `.npy` and `.npz` piece by piece: the rows of an array as they come, never the whole, and never a pickle."""

from __future__ import annotations

import ast
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from placement.errors import TraceError

MAGIC = b"\x93NUMPY"
MOST_HEADER_BYTES = 10_000
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
        shape, fortran, dtype = _header(file)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise TraceError(f"{source}: not a readable .npy: {' '.join(str(error).split())[:160]}") from error
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise TraceError(f"{source}: not a readable .npy: {error}") from error
    if dtype.hasobject:
        raise TraceError(f"{source}: holds Python objects ({dtype}), which are never loaded; save plain numbers")
    if fortran and len(shape) > 1:
        raise TraceError(f"{source}: is in Fortran order; save it with np.ascontiguousarray")
    return ArrayStream(source=source, shape=shape, dtype=dtype, _file=file)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether in Fortran order, type. numpy's own reader tries to mend Python 2's headers; this one does not."""
    start = file.read(8)
    width = {b"\x01\x00": 2, b"\x02\x00": 4, b"\x03\x00": 4}.get(start[6:])
    if start[:6] != MAGIC or width is None:
        raise ValueError(f"it begins with {start!r}, not with {MAGIC!r} and a version from 1 to 3")
    length = int.from_bytes(file.read(width), "little")
    text = file.read(min(length, MOST_HEADER_BYTES))
    if len(text) != length:
        raise ValueError(f"its header of {length} bytes is cut, or over {MOST_HEADER_BYTES}")
    header = ast.literal_eval(text.decode("latin1").strip())
    if not isinstance(header, dict) or set(header) != {"descr", "fortran_order", "shape"}:
        raise ValueError("its header must name descr, fortran_order and shape")
    shape, descr = header["shape"], header["descr"]
    if not isinstance(shape, tuple) or not all(type(size) is int and 0 <= size < 2**48 for size in shape):
        raise ValueError(f"its shape is {str(shape)[:60]}")
    if not isinstance(descr, str) or not isinstance(header["fortran_order"], bool):
        raise ValueError(f"its type is {str(descr)[:60]}; plain numbers are expected")
    return shape, header["fortran_order"], np.dtype(descr)


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
