"""A policy that learns beside its caller, in a thread of its own.

What a lookup teaches takes longer than all else that the host does for a layer of one token, and nobody needs it before
somebody has to make room. It is one compiled call, during which other threads run. Whoever asks the policy anything
waits until it has learned what it was given before, so that it decides as it would without the thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from placement.cache.policy import Candidates, EvictionPolicy, Run


class Learner:
    """See `EvictionPolicy` for what is not said here."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.num_layers = policy.num_layers
        self.num_experts = policy.num_experts
        self._policy = policy
        self._thread: ThreadPoolExecutor | None = None
        self._begun: Future[list[int]] | None = None

    def begin(self, runs: Sequence[Run], then: Candidates | None = None) -> Future[list[int]]:
        """Begin to learn runs, one after the other, and then to rank candidates; nobody may change their arrays."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        self._begun = self._thread.submit(self._policy.learn, runs, then)
        return self._begun

    def wait(self) -> None:
        """Return once all that was begun is learned."""
        if self._begun is not None:
            begun, self._begun = self._begun, None
            begun.result()

    def observe(self, layer: int, experts: NDArray[np.int64]) -> None:
        self.wait()
        self._policy.observe(layer, experts)

    def values(self, layers: NDArray[np.int64], experts: NDArray[np.int64]) -> NDArray[np.float64]:
        self.wait()
        return self._policy.values(layers, experts)

    def rank(self, candidates: Candidates) -> list[int]:
        self.wait()
        return self._policy.rank(*candidates)

    def chances(self, layer: int) -> NDArray[np.float64]:
        self.wait()
        return self._policy.chances(layer)

    def close(self) -> None:
        """End the thread, if there is one."""
        self.wait()
        if self._thread is not None:
            self._thread.shutdown()
