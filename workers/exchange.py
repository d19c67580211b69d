"""The exchange: tokens go to the ranks of their experts and come home as sums.

A token travels once to each rank that needs it, with the ids and weights of its experts there, and comes back as one
summed vector. Each call is three collectives that every rank joins, with zero tokens if it has none. The first carries
counts and epochs: a rank refuses to go on with a peer of another epoch. `workers/gathering.py` is the other way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from placement.errors import ExchangeError, StaleEpochError
from workers.group import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Tokens that other ranks (and this one) sent here, in order of sender.

    hidden [n, H]; experts [n, K], -1 where the token's k-th expert lies elsewhere; weights float32 [n, K]. known: the
    experts as the host knows them, where it does.
    """

    hidden: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor
    known: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """What was sent: token [m] the local token of each row sent, in order of destination, and the counts per rank."""

    token: torch.Tensor
    sent: list[int]
    received: list[int]


class Exchange:
    """One rank's side of the exchange over a process group.

    partial_dtype is the type in which sums travel home: float64 on CPUs, where it makes the text independent of how a
    token's experts are spread over ranks. attempt runs what takes memory while other ranks wait for this one, which
    it may do again after it has made room.
    """

    def __init__(
        self,
        group: Group,
        *,
        num_ranks: int,
        partial_dtype: torch.dtype,
        attempt: Callable[[Callable[[], Any]], Any] = lambda work: work(),
    ) -> None:
        self._group = group
        self._attempt = attempt
        self._num_ranks = num_ranks
        self._partial_dtype = partial_dtype
        self.sent_rows = 0

    def dispatch(
        self,
        *,
        epoch: int,
        hidden: torch.Tensor,
        experts: NDArray[np.int64],
        weights: torch.Tensor,
        ranks: NDArray[np.int32],
    ) -> tuple[Dispatch, Arrivals]:
        """Send hidden [T, H] with experts and weights [T, K] to ranks [T, K]. Raises StaleEpochError.

        experts and ranks lie on the host, so that what goes where is known there without a wait for the device.
        """
        going = (ranks[None] == np.arange(self._num_ranks)[:, None, None]).any(axis=2)
        destination, token = np.nonzero(going)
        sent: list[int] = going.sum(axis=1).tolist()
        here = experts[token].astype(np.int32)
        here[ranks[token] != destination[:, None]] = -1
        rows_of = torch.from_numpy(token).to(hidden.device)
        # torch.from_numpy gives an empty array strides of 0, of which no view of bytes can be made.
        own = torch.empty(here.shape, dtype=torch.int32, device=hidden.device).copy_(torch.from_numpy(here))
        rows = _pack(hidden[rows_of], weights[rows_of].float(), own)
        received = self._swap_counts(epoch, sent, hidden.device)
        plan = Dispatch(token=rows_of, sent=sent, received=received)
        self.sent_rows += len(token)
        arrived = self._empty((sum(received), rows.shape[1]), torch.uint8, hidden.device)
        self._all_to_all(arrived, rows, received, sent)
        arrivals: Arrivals = self._attempt(lambda: _unpack(arrived, hidden.shape[1], hidden.dtype, experts.shape[1]))
        return plan, arrivals

    def combine(self, plan: Dispatch, partial: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Send partial [n, H], a sum for each arrival, home. Returns [T, H] in partial_dtype."""
        returned = self._empty((len(plan.token), partial.shape[1]), partial.dtype, partial.device)
        self._all_to_all(returned, partial.contiguous(), plan.sent, plan.received)
        out = torch.zeros((num_tokens, partial.shape[1]), dtype=partial.dtype, device=partial.device)
        return out.index_add_(0, plan.token, returned)

    def _empty(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        tensor: torch.Tensor = self._attempt(lambda: torch.empty(shape, dtype=dtype, device=device))
        return tensor

    @property
    def partial_dtype(self) -> torch.dtype:
        return self._partial_dtype

    def _swap_counts(self, epoch: int, sent: list[int], device: torch.device) -> list[int]:
        outgoing = torch.tensor([[count, epoch] for count in sent], dtype=torch.int64, device=device)
        incoming = torch.empty_like(outgoing)
        self._all_to_all(incoming, outgoing, None, None)
        counts, epochs = incoming.cpu().unbind(dim=1)
        self._group.check()
        check_epochs(epoch, epochs.tolist())
        result: list[int] = counts.tolist()
        return result

    def _all_to_all(
        self, incoming: torch.Tensor, outgoing: torch.Tensor, received: list[int] | None, sent: list[int] | None
    ) -> None:
        try:
            self._group.all_to_all(incoming, outgoing, received, sent)
        except ExchangeError as error:
            raise ExchangeError(f"the exchange with the other ranks failed: {error}") from error


def check_epochs(epoch: int, others: list[int]) -> None:
    """others: the epoch that each rank serves, by rank. Raises StaleEpochError for one that is not this."""
    for rank, other in enumerate(others):
        if other != epoch:
            raise StaleEpochError(f"this rank serves epoch {epoch}, but rank {rank} serves {other}")


def _pack(hidden: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """One row of bytes a token, so that one collective carries all three."""
    parts = [part.contiguous().view(torch.uint8) for part in (hidden, weights, experts)]
    return torch.cat(parts, dim=1)


def _unpack(rows: torch.Tensor, hidden_size: int, dtype: torch.dtype, top_k: int) -> Arrivals:
    sizes = [hidden_size * dtype.itemsize, top_k * 4, top_k * 4]
    hidden, weights, experts = (part.contiguous() for part in torch.split(rows, sizes, dim=1))
    return Arrivals(
        hidden=hidden.view(dtype).view(-1, hidden_size),
        weights=weights.view(torch.float32).view(-1, top_k),
        experts=experts.view(torch.int32).view(-1, top_k),
    )
