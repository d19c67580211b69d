"""The exchange: tokens go to the ranks of their experts and come home as sums.

A token travels once to each rank that needs it, with the ids and weights of its experts there, and comes back as one
summed vector. Each call is three collectives that every rank joins, with zero tokens if it has none. The first carries
counts and epochs: a rank refuses to go on with a peer of another epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from placement.errors import ExchangeError, StaleEpochError
from workers.peers import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Tokens that other ranks (and this one) sent here, in order of sender.

    hidden [n, H]; experts int32 [n, K], -1 where the token's k-th expert lies elsewhere; weights float32 [n, K].
    """

    hidden: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor


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
        self, *, epoch: int, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, ranks: torch.Tensor
    ) -> tuple[Dispatch, Arrivals]:
        """Send hidden [T, H] with experts and weights [T, K] to ranks [T, K]. Raises StaleEpochError."""
        destinations = torch.arange(self._num_ranks, device=hidden.device)
        going = (ranks.unsqueeze(0) == destinations[:, None, None]).any(dim=-1)
        destination, token = going.nonzero(as_tuple=True)
        here = ranks[token] == destination.unsqueeze(1)
        rows = _pack(hidden[token], weights[token].float(), torch.where(here, experts[token], -1).to(torch.int32))
        sent = torch.bincount(destination, minlength=self._num_ranks)
        received = self._swap_counts(epoch, sent)
        plan = Dispatch(token=token, sent=sent.tolist(), received=received)
        self.sent_rows += len(token)
        arrived = self._empty((sum(received), rows.shape[1]), torch.uint8, hidden.device)
        self._all_to_all(arrived, rows, plan.received, plan.sent)
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

    def _swap_counts(self, epoch: int, sent: torch.Tensor) -> list[int]:
        outgoing = torch.stack([sent, torch.full_like(sent, epoch)], dim=1)
        incoming = torch.empty_like(outgoing)
        self._all_to_all(incoming, outgoing, None, None)
        counts, epochs = incoming.unbind(dim=1)
        others = epochs.tolist()
        stale = [rank for rank, other in enumerate(others) if other != epoch]
        if stale:
            raise StaleEpochError(f"this rank serves epoch {epoch}, but rank {stale[0]} serves {others[stale[0]]}")
        result: list[int] = counts.tolist()
        return result

    def _all_to_all(
        self, incoming: torch.Tensor, outgoing: torch.Tensor, received: list[int] | None, sent: list[int] | None
    ) -> None:
        try:
            self._group.all_to_all(incoming, outgoing, received, sent)
        except ExchangeError as error:
            raise ExchangeError(f"the exchange with the other ranks failed: {error}") from error


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
