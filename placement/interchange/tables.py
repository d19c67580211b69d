"""A JSON table of integers, parsed by compiled code: router traces are hundreds of gigabytes of `[[1,2],[3,4]]`."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numpy.typing import NDArray

LARGEST = 10**8
OPEN, CLOSE, COMMA, MINUS, ZERO, NINE = (ord(sign) for sign in "[],-09")
BLANKS = (ord(" "), ord("\t"))


@nb.njit(cache=True, nogil=True)
def _parse(text: Any, out: Any) -> Any:
    """Fill out with the numbers; (rows, width), or (-1, 0) where the text is no rectangular table of integers."""
    bad = (-1, 0)
    count, rows, width, in_row, depth, index = 0, 0, -1, 0, 0, 0
    want_value, after_value = True, False
    while index < len(text):
        sign = text[index]
        if sign == BLANKS[0] or sign == BLANKS[1]:
            index += 1
        elif sign == OPEN:
            if depth == 2 or not want_value:
                return bad
            depth += 1
            in_row = 0
            index += 1
        elif sign == CLOSE:
            if depth == 0 or not after_value:
                return bad
            if depth == 2:
                if width >= 0 and in_row != width:
                    return bad
                width = in_row
                rows += 1
            depth -= 1
            want_value, after_value = False, True
            index += 1
            if depth == 0 and index != len(text):
                return bad
        elif sign == COMMA:
            if not after_value or depth == 0:
                return bad
            want_value, after_value = True, False
            index += 1
        else:
            if depth != 2 or not want_value:
                return bad
            negative = sign == MINUS
            if negative:
                index += 1
            value, digits = 0, 0
            while index < len(text) and ZERO <= text[index] <= NINE and value < LARGEST:
                value = value * 10 + (text[index] - ZERO)
                digits += 1
                index += 1
            if digits == 0 or value >= LARGEST:
                return bad
            out[count] = -value if negative else value
            count += 1
            in_row += 1
            want_value, after_value = False, True
    return (rows, width) if depth == 0 and rows > 0 else bad


def parse_table(text: bytes) -> NDArray[np.int32] | None:
    """[rows, width] int32 of text such as b'[[1, 2], [3, 4]]'; None where it is anything else, for a full parser."""
    out = np.empty(text.count(b",") + 1, np.int32)
    rows, width = _parse(np.frombuffer(text, np.uint8), out)
    return None if rows < 0 else out[: rows * width].reshape(rows, width).copy()
