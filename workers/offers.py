"""What one process tells another of where a blob lies, so that it can read it there (see `shared_slab`)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

_FORM = struct.Struct("<16sqqqq?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Where a row lies: the machine (as processes see it that can open each other's files), process, file, row.

    lends: whether who finds it may keep it there; else it may read it.
    """

    machine: bytes
    process: int
    file: int
    rows: int
    row: int
    lends: bool = False

    NUM_BYTES = _FORM.size

    def pack(self) -> bytes:
        return _FORM.pack(self.machine, self.process, self.file, self.rows, self.row, self.lends)

    @staticmethod
    def unpack(raw: bytes) -> Offer:
        machine, process, file, rows, row, lends = _FORM.unpack(raw)
        return Offer(machine=machine, process=process, file=file, rows=rows, row=row, lends=lends)


NOTHING = Offer(machine=bytes(16), process=0, file=0, rows=0, row=0)
