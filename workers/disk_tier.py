"""The disk tier: where the blob of an expert comes from that host memory has no room for.

From the checkpoint's own files, converted and quantised anew at each read; or from a file of blobs on a path of the
operator's choice, which is written once and then read into place. That file has no name from the moment it is made, so
that its space is free again however this process ends. All reads are `pread`, never page faults: a disk that fails is
an error, not a signal.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from placement.core import ExpertId
from placement.errors import ConfigError, DiskError
from workers.expert_source import ExpertSource
from workers.shards import read_into

TRIES = 2


@dataclass(slots=True, kw_only=True)
class DiskCounters:
    """Since the worker started. disk_stall_s: what computing waited for reads; demotions: blobs dropped from memory."""

    disk_reads: int = 0
    disk_bytes: int = 0
    disk_failures: int = 0
    disk_stall_s: float = 0.0
    demotions: int = 0


class BlobFile:
    """Blobs by expert in a nameless file of a folder. Raises ConfigError where none can be made there."""

    def __init__(self, folder: Path, blob_bytes: int) -> None:
        self._folder = folder
        self._blob_bytes = blob_bytes
        self._places: dict[ExpertId, int] = {}
        self._sums: dict[ExpertId, int] = {}
        self._lock = threading.Lock()
        try:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (open as long as the worker lives)
        except OSError as error:
            raise ConfigError(f"workers.disk_path '{folder}': no file can be made there: {error.strerror}") from error

    def __contains__(self, expert: ExpertId) -> bool:
        return expert in self._places

    def write(self, expert: ExpertId, blob: torch.Tensor) -> None:
        """Raises DiskError, for a full disk for one; the expert is not in the file then."""
        with self._lock:
            place = self._places.get(expert, len(self._places))
            data, done = blob.numpy().data, 0
            try:
                while done < len(data):
                    done += os.pwrite(self._file.fileno(), data[done:], place * self._blob_bytes + done)
            except OSError as error:
                raise DiskError(f"{expert} cannot be written below '{self._folder}': {error.strerror}") from error
            self._places[expert] = place
            self._sums[expert] = zlib.crc32(data)

    def read(self, expert: ExpertId, out: torch.Tensor) -> None:
        """Raises OSError where the disk fails, or gives what was not written."""
        read_into(self._file.fileno(), self._places[expert] * self._blob_bytes, out)
        if zlib.crc32(out.numpy().data) != self._sums[expert]:
            raise OSError(f"below '{self._folder}' another blob was read than was written")


class DiskTier:
    """source: gives any expert, if it lasts; file: blobs that were written. One of them there must be."""

    def __init__(self, *, source: ExpertSource | None, file: BlobFile | None) -> None:
        assert source is not None or file is not None
        self._source = source
        self._file = file
        self.counters = DiskCounters()
        self._lock = threading.Lock()

    def keep(self, expert: ExpertId, blob: torch.Tensor) -> None:
        """See to it that a blob can be read again. Raises DiskError."""
        if self._file is None or expert in self._file:
            return
        try:
            self._file.write(expert, blob)
        except DiskError:
            if self._source is None:
                raise

    def read(self, expert: ExpertId, out: torch.Tensor) -> None:
        """Write an expert's blob into out, from the second place where the first fails. Raises DiskError."""
        reasons: list[str] = []
        places: list[BlobFile | ExpertSource] = []
        if self._file is not None and expert in self._file:
            places.append(self._file)
        if self._source is not None:
            places.append(self._source)
        for place in places * TRIES:
            try:
                place.read(expert, out)
            except (OSError, ConfigError) as error:
                reasons.append(str(error))
                continue
            with self._lock:
                self.counters.disk_reads += 1
                self.counters.disk_bytes += out.numel()
            return
        with self._lock:
            self.counters.disk_failures += 1
        raise DiskError(f"{expert} cannot be read from disk, tried {len(reasons)} times: {reasons[0]}")

    def stalled(self, begun: float) -> None:
        """The computing has waited since then (time.perf_counter)."""
        with self._lock:
            self.counters.disk_stall_s += time.perf_counter() - begun
