"""Recovering sequences where a recorder keeps none: from positions, and from how a batch goes on.

A prefill pass lists its sequences one after the other (`extend_seq_lens`, or positions that go on by one). A decode
pass has one token a sequence, in the order of the batch before it with the finished ones taken out; so a token belongs
to the next sequence, in that order, that expects its position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from placement.errors import TraceError

MOST_MISSED = 64


def segments_of(positions: NDArray[Any], lengths: list[int] | None, *, decode: bool, source: str) -> NDArray[np.int64]:
    """Where each sequence of a pass starts, [S]. lengths: extend_seq_lens, which may cover padding by less tokens.

    Raises TraceError where the lengths do not fit the tokens.
    """
    count = len(positions)
    if lengths is not None:
        used = [length for length in lengths if length]
        if min(used, default=0) < 0 or sum(used) != count:
            raise TraceError(f"{source}: 'extend_seq_lens' sums to {sum(used)}, but there are {count} tokens")
        ends = np.cumsum(used, dtype=np.int64)
        return np.concatenate([[0], ends[:-1]]).astype(np.int64) if count else np.zeros(0, np.int64)
    if decode:
        return np.arange(count, dtype=np.int64)
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return np.concatenate([[0], breaks]).astype(np.int64) if count else np.zeros(0, np.int64)


@dataclass(slots=True)
class _Open:
    request: int
    expects: int
    missed: int = 0


@dataclass(slots=True)
class Sequences:
    """The open sequences of each rank, and the number of sequences so far. Passes come in order, rank by rank."""

    count: int = 0
    _open: dict[int, list[_Open]] = field(default_factory=dict)

    def of_pass(
        self, rank: int, positions: NDArray[Any], starts: NDArray[np.int64], *, decode: bool
    ) -> NDArray[np.int64]:
        """The request of each token [T]."""
        waiting = self._open.get(rank, [])
        lengths = np.diff(np.append(starts, len(positions)))
        going_on: list[_Open] = []
        place = 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            first = int(positions[start])
            found = None if first == 0 else _next_that_expects(waiting, place, first)
            if found is None:
                one = _Open(request=self.count, expects=first)
                self.count += 1
            else:
                one = waiting.pop(found)
                place = found
            one.expects, one.missed = int(positions[start + length - 1]) + 1, 0
            going_on.append(one)
        for other in waiting:
            other.missed += decode
        kept = [other for other in waiting if other.missed <= MOST_MISSED]
        # After a decode pass the batch comes first; a prefill pass adds its sequences at the end.
        self._open[rank] = [*going_on, *kept] if decode else [*kept, *going_on]
        return np.repeat([one.request for one in going_on], lengths).astype(np.int64)


def _next_that_expects(waiting: list[_Open], place: int, position: int) -> int | None:
    around = (*range(place, len(waiting)), *range(place))
    return next((index for index in around if waiting[index].expects == position), None)
