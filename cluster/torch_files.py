"""Reading `.pt` files of other people's machines: weights only, on the CPU, mapped where that can be."""

from __future__ import annotations

import ctypes
import mmap
import pickle
import struct
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from placement.errors import TraceError

MADV_PAGEOUT = 21
_LIBC = ctypes.CDLL(None)
_UNREADABLE = (
    *(OSError, EOFError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(MemoryError, struct.error, zipfile.BadZipFile),
)


def read_pt(path: Path) -> Any:
    """What a `.pt` holds, tensors as numpy arrays. Code in its pickle never runs. Raises TraceError naming the file."""
    import torch

    try:
        # Only the zip form can be mapped; the older one is read whole.
        mapped = zipfile.is_zipfile(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            raw = torch.load(path, weights_only=True, map_location="cpu", mmap=mapped)
    except pickle.UnpicklingError as error:
        raise TraceError(
            f"{path}: holds more than tensors and plain values, which is never loaded: {_short(error)}"
        ) from error
    except _UNREADABLE as error:
        raise TraceError(f"{path}: not a readable .pt file: {_short(error)}") from error
    return _plain(raw, path)


def forget_pages(record: dict[str, Any]) -> None:
    """Let the system take back the memory of a record's arrays, which were mapped from a file and are done with.

    Reading a mapped file of any size would else fill memory with it. The advice harms nothing: what is read again is
    fetched again, and a system that does not know it ignores it.
    """
    for array in record.values():
        if not isinstance(array, np.ndarray):
            continue
        first = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_PAGEOUT)


def _short(error: Exception) -> str:
    """torch explains at length, and how to load it nevertheless; neither helps here."""
    text = " ".join(str(error).split())
    marker = "WeightsUnpickler error:"
    return (text.split(marker, 1)[1].strip() if marker in text else text)[:160]


def _plain(value: Any, path: Path) -> Any:
    """Lists, dictionaries, numbers, texts and arrays. Raises TraceError for anything else."""
    import torch

    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.device.type != "cpu":
            raise TraceError(f"{path}: holds a {value.layout} tensor on {value.device}; dense ones are expected")
        whole = value.detach()
        return (whole.float() if whole.dtype is torch.bfloat16 else whole).numpy()
    if isinstance(value, dict):
        return {key: _plain(one, path) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        # A list of a million token ids is one array's worth of numbers: no look at each.
        return value if value and type(value[0]) in (int, float) else [_plain(one, path) for one in value]
    if value is None or isinstance(value, (bool, int, float, str, np.generic)):
        return value
    raise TraceError(f"{path}: holds a {type(value).__name__}; tensors and plain values are expected")
