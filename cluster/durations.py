"""Spans of time as people write them on a command line."""

from __future__ import annotations

import re

from placement.errors import ConfigError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds_of(text: str, option: str) -> float:
    """`90s`, `10m`, `6h`, `1d` in seconds. Raises ConfigError that names the option."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([smhd])", text.strip())
    if found is None or float(found[1]) <= 0:
        raise ConfigError(f"{option}: write a time above 0 such as 90s, 10m, 6h or 1d; got '{text[:40]}'")
    return float(found[1]) * _SECONDS[found[2]]
