"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def human_bytes(num_bytes: float) -> str:
    """Three digits and a decimal unit: 34.5 MB."""
    size, unit = float(num_bytes), 0
    while abs(size) >= 999.5 and unit < len(UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {UNITS[unit]}"


def percent(share: float) -> str:
    """-25%, -2.5%, 0%: with its sign, and one decimal below ten percent."""
    text = f"{share:+.0%}" if abs(share) >= 0.0995 else f"{share:+.1%}"
    return "0%" if text in ("+0.0%", "-0.0%") else text


def quantity(value: float, unit: str) -> str:
    """A measured value with its unit; '%' takes a share, 'B' and 'bytes' are scaled."""
    if not isfinite(value):
        return "not known"
    if unit == "%":
        return f"{round(100 * value, 1) + 0.0:.1f} %"
    if unit in ("B", "bytes"):
        return human_bytes(value)
    shown = f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.3g}"
    return f"{shown} {unit}".strip()


def tick_step(count: int, most: int) -> int:
    """The step (1, 2, 5, 10, 20, ...) between whole-numbered ticks that leaves at most `most` of `count`."""
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if count <= most * digit * scale:
                return digit * scale
        scale *= 10


def number_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, runs drawn together: '0-3, 7, 9-10'."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(str(end) for end in run) for run in runs)


def seconds(value: float) -> str:
    """Three digits and a unit that fits: 1.5 ms, 23 s, 4.2 min."""
    if value >= 100:
        return f"{value / 60:.3g} min"
    if value >= 1:
        return f"{value:.3g} s"
    return f"{1000 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} us"
