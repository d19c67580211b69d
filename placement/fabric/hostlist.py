"""Slurm host lists: `n[201-202,205]`, `rack[0-1]node[01-16]`, `a,b[1-3]`, written out as names."""

from __future__ import annotations

import re
from itertools import product

from placement.errors import TopologyError

MOST_HOSTS = 200_000
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hosts(text: str, *, source: str) -> list[str]:
    """The names of a host list, in its order. Leading zeros are kept: `n[08-10]` is n08, n09, n10.

    source says where the list stands, for errors. Raises TopologyError.
    """
    names: list[str] = []
    for item in _items(text, source):
        names.extend(_expand_item(item, source, MOST_HOSTS - len(names)))
    if not names:
        raise TopologyError(f"{source}: the host list is empty")
    return names


def _items(text: str, source: str) -> list[str]:
    """The parts between the commas that stand outside brackets."""
    items, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise TopologyError(f"{source}: host list '{text[:60]}': brackets do not match")
        if letter == "," and depth == 0:
            items.append(text[start:index])
            start = index + 1
    if depth:
        raise TopologyError(f"{source}: host list '{text[:60]}': brackets do not match")
    return [item.strip() for item in [*items, text[start:]] if item.strip()]


def _expand_item(item: str, source: str, room: int) -> list[str]:
    parts: list[list[str]] = []
    position, count = 0, 1
    while position < len(item):
        piece = _PIECE.match(item, position)
        if piece is None:
            raise TopologyError(f"{source}: host list '{item[:60]}': {item[position]!r} does not belong in a name")
        parts.append([piece[2]] if piece[1] is None else _numbers(piece[1], source, room))
        count *= len(parts[-1])
        if count > room:
            raise TopologyError(f"{source}: host list '{item[:60]}' names more than {MOST_HOSTS} hosts")
        position = piece.end()
    return ["".join(one) for one in product(*parts)]


def _numbers(inside: str, source: str, room: int) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise TopologyError(f"{source}: host list '[{inside[:60]}]': '{part[:20]}' is neither a number nor a range")
        first, last = found[1], found[2] or found[1]
        if int(last[:12]) < int(first[:12]) or len(last) > 12 or len(first) > 12:
            raise TopologyError(f"{source}: host list '[{inside[:60]}]': range {part[:30]} runs backwards or too far")
        if int(last) - int(first) >= room:
            raise TopologyError(f"{source}: host list '[{inside[:60]}]' names more than {MOST_HOSTS} hosts")
        numbers.extend(str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
    return numbers
