"""The exchange among ranks on fast links of one node: every rank gets every token, and one reduction brings sums home.

With top-8 routing over a few ranks nearly every token goes to every rank anyway. Then no counts need to be told: each
rank gives as many rows as the rank with most tokens has (the ranks agree on that before the step, on the host), the
sizes are known, and nothing depends on what the device finds; so the calls can stand in a CUDA graph. Hidden states
travel with a label each (`workers/packing.py`): where its experts are served, the sender's epoch, their weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from placement.errors import ExchangeError
from workers.exchange import Arrivals, check_epochs
from workers.group import Group
from workers.packing import pack_for, row_elements, split_rows
from workers.staging import Staging

# Below this share of rows that are needed where they go, the bytes saved by sending fewer are worth telling counts.
MIN_NEEDED = 0.6
# Labels of larger steps come from pageable memory.
LABEL_WORDS = 1 << 16


def is_worth_gathering(*, num_ranks: int, num_nodes: int, top_k: int) -> bool:
    """Whether most tokens go to most ranks anyway, over links of one node."""
    return num_nodes == 1 and num_ranks > 1 and 1 - (1 - 1 / num_ranks) ** top_k >= MIN_NEEDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """capacity: the rows of each rank."""

    capacity: int


class GatherExchange:
    """One rank's side of it. Takes and gives what `Exchange` does, with the capacity [C] of the step besides."""

    def __init__(
        self,
        group: Group,
        *,
        rank: int,
        num_ranks: int,
        num_experts: int,
        partial_dtype: torch.dtype,
        device: torch.device,
        attempt: Callable[[Callable[[], Any]], Any] = lambda work: work(),
    ) -> None:
        self._group = group
        self._attempt = attempt
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_experts = num_experts
        self._partial_dtype = partial_dtype
        self._pack = pack_for(device)
        # What was sent is done when the labels are on the host: before the next step's.
        self._staging = Staging(device, dtype=torch.int32, capacity=LABEL_WORDS)

    def touch(self, hidden: torch.Tensor, top_k: int) -> None:
        """Run its own kernel once, without the other ranks, for weights in either type. hidden [n, H]."""
        rows = hidden.new_empty((len(hidden), row_elements(hidden.shape[1], top_k, hidden.dtype)))
        codes = torch.zeros((len(hidden), top_k + 1), dtype=torch.int32, device=hidden.device)
        for dtype in {torch.float32, hidden.dtype}:
            self._pack(rows, hidden, codes, torch.zeros((len(hidden), top_k), dtype=dtype, device=hidden.device))

    def dispatch(
        self,
        *,
        epoch: int,
        hidden: torch.Tensor,
        experts: NDArray[np.int64],
        weights: torch.Tensor,
        ranks: NDArray[np.int32],
        capacity: int,
    ) -> tuple[Gathered, Arrivals]:
        """Give hidden [T, H] with experts and weights [T, K] to all; ranks [T, K] take what is theirs.

        The arrivals are [R * C]; their experts lie on the host, which waits for the device here and only here.
        Raises StaleEpochError, and ExchangeError for more tokens than the ranks agreed on.
        """
        num_tokens, top_k = experts.shape
        if num_tokens > capacity:
            raise ExchangeError(f"this rank has {num_tokens} tokens in a step of at most {capacity}")
        self._staging.begin()
        codes = self._staging.send(self._codes(epoch, experts, ranks, capacity))
        arrived, label = self.gather(hidden, weights, codes)
        told = label[:, : top_k + 1].cpu().numpy()
        self._group.check()
        check_epochs(epoch, told[::capacity, -1].tolist())
        served = told[:, :top_k] - self._rank * self._num_experts
        # Below 0 is a large number here.
        served[served.view(np.uint32) >= self._num_experts] = -1
        return Gathered(capacity=capacity), Arrivals(
            hidden=arrived,
            experts=torch.from_numpy(served),
            weights=label.view(torch.float32)[:, top_k + 1 :].contiguous(),
        )

    def _codes(
        self, epoch: int, experts: NDArray[np.int64], ranks: NDArray[np.int32], capacity: int
    ) -> NDArray[np.int32]:
        """[C, K + 1]: rank * E + expert, -1 without a token; the epoch."""
        num_tokens, top_k = experts.shape
        view = np.empty((capacity, top_k + 1), np.int32)
        code = view[:num_tokens, :top_k]
        np.multiply(ranks, self._num_experts, out=code)
        np.add(code, experts, out=code, casting="unsafe")
        view[num_tokens:, :top_k] = -1
        view[:, top_k] = epoch
        return view

    def gather(
        self, hidden: torch.Tensor, weights: torch.Tensor, codes: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [T, H], weights [T, K], codes [C, K + 1] -> hidden [R * C, H], labels [R * C, 2K + 1] of all ranks.

        Nothing here waits for the device or depends on what is in the tensors.
        """
        top_k, hidden_size, capacity = weights.shape[1], hidden.shape[1], len(codes)
        shape = (self._num_ranks * capacity, row_elements(hidden_size, top_k, hidden.dtype))
        rows: torch.Tensor = self._attempt(lambda: hidden.new_empty(shape))
        self._pack(rows[self._rank * capacity : (self._rank + 1) * capacity], hidden, codes, weights)
        try:
            self._group.all_gather(rows)
        except ExchangeError as error:
            raise ExchangeError(f"the exchange with the other ranks failed: {error}") from error
        return split_rows(rows, hidden_size, top_k)

    def combine(self, plan: Gathered, partial: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Add partial [R * C, H] of all ranks, each rank's rows at home. Returns [T, H] in partial_dtype."""
        out: torch.Tensor = self._attempt(lambda: partial.new_empty((plan.capacity, partial.shape[1])))
        try:
            self._group.reduce_scatter(out, partial.contiguous())
        except ExchangeError as error:
            raise ExchangeError(f"the exchange with the other ranks failed: {error}") from error
        return out[:num_tokens]

    @property
    def partial_dtype(self) -> torch.dtype:
        return self._partial_dtype
