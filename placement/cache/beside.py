"""The loop of a policy that learns beside its caller, in a thread that never holds Python's lock.

It lies with the rest of what is compiled: code that it has in it is dropped when their files change
(`placement.kernel_cache`), and it is compiled before anything is served (`compile_policies`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from placement.cache.memory import PolicyMemory
from placement.cache.ranking import Lesson, learn_and_rank

RUNS, SLOTS, ROOM, RANKED, LEARNED, HEADER = range(6)
GO_ON, END = b"\0", b"\1"

_read = types.ExternalFunction("read", types.intp(types.intc, types.uintp, types.uintp))
_write = types.ExternalFunction("write", types.intp(types.intc, types.uintp, types.uintp))


@njit(cache=True, nogil=True)
def serve(memory: PolicyMemory, mail: NDArray[Any], lesson: Lesson, asked: int, tell: int) -> None:
    """Until END comes through the pipe `asked`, or its other end is closed: for each GO_ON learn the first runs of a
    lesson, rank its first slots, and say at the pipe `tell` that it is done.

    mail [HEADER]: how many runs and slots, and for how many to make room; then how many were ranked, and that it is
    done. What goes through pipes puts memory in order, for both sides.
    """
    byte = np.zeros(1, np.uint8)
    while True:
        got = _read(asked, byte.ctypes.data, 1)
        if got == 0 or byte[0] == 1:
            return
        if got != 1:
            continue  # A signal came.
        mail[RANKED] = learn_and_rank(memory, lesson, mail[RUNS], mail[SLOTS], mail[ROOM])
        mail[LEARNED] = 1
        while _write(tell, byte.ctypes.data, 1) != 1:
            pass
