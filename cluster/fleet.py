"""The fleet: a running set of workers and its placement service, seen from the process that serves.

Requests go to a home rank and come back as events. When a rank is lost the others go on, and so do all requests, from
the tokens that they have: whoever waits for them sees a pause and nothing else.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any

import ray

from cluster.actors.service import start_service
from cluster.answers import answer
from cluster.config import ClusterConfig
from cluster.crew import Crew, dismiss
from cluster.devices import choose_device
from cluster.forming import Meeting
from cluster.history import History, Member
from cluster.keeper import Keeper
from cluster.ledger import Generation, Ledger
from cluster.local_ray import head_is_gone
from cluster.outcomes import RebalanceResult
from cluster.seating import reserve
from cluster.sizing import sized_options
from cluster.starting import history_path, starting_plan
from cluster.watch import Watch
from placement.errors import MoetisError
from placement.planfile import Plan
from placement.topology import load_topology
from workers.events import CANCELLED
from workers.loading import ModelShape
from workers.requests import GenerationRequest
from workers.step_clock import StepSeconds
from workers.vitals import WorkerStatus

STOP_TIMEOUT_S = 20.0

__all__ = ["Fleet", "Generation", "answer"]


class Fleet:
    """Workers and service of one cluster, inside a Ray session that the caller holds open.

    note is told what happens to the ranks in a few words; failed, once, what ended the service for good.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        note: Callable[[str], None] = lambda text: None,
        failed: Callable[[MoetisError], None] = lambda error: None,
    ) -> None:
        self.topology = load_topology(config.topology)
        self.initial = starting_plan(config, self.topology, History(history_path(config)))
        config.run_dir.mkdir(parents=True, exist_ok=True)
        num_seats = self.topology.num_ranks
        num_gpus = ray.cluster_resources().get("GPU", 0)
        device = choose_device(config.workers.device, num_ranks=num_seats, num_gpus=num_gpus)
        options = sized_options(config, self.topology, device, note)
        gpus_per_rank = 1 if device == "cuda" else 0
        self._service = start_service(
            history=history_path(config),
            initial=self.initial,
            trace_dir=config.trace_dir.absolute(),
            min_gain=config.rebalance.min_gain,
            seed=config.rebalance.seed,
            window_tokens=config.rebalance.window_tokens,
            meeting=Meeting(
                host=config.workers.host,
                interface=config.workers.interface,
                checkpoint_bandwidth=config.rebalance.checkpoint_gb_s * 1e9,
            ),
        )
        try:
            self._group = reserve(self.topology, config.ray.node_labels, num_gpus=gpus_per_rank)
        except MoetisError:
            ray.kill(self._service)
            raise
        self._ledger = Ledger()
        self._keeper = Keeper(
            Crew(options, self.topology, name=config.name, num_gpus=gpus_per_rank, group=self._group),
            self._service,
            self._ledger,
            config.faults,
            num_seats=num_seats,
            note=note,
            failed=failed,
        )
        try:
            self._keeper.begin(self.initial.placement)
        except MoetisError:
            self._kill()
            raise
        hand = next(iter(self._keeper.hands.values()))
        self.shape: ModelShape = answer(hand.ready)[0]
        self._watch = Watch(self._keeper, self._service, config.faults)

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        homes: Sequence[int] | None = None,
        *,
        events: queue.SimpleQueue[Any] | None = None,
    ) -> list[Generation]:
        """Send each request to its home (a seat), in turn unless given. A refused one ends at once, with the reason.

        events: one queue for the events of all these requests, in place of one for each.
        """
        seats = homes if homes is not None else [self._keeper.post.next_seat() for _ in requests]
        generations = [
            self._ledger.add(request, seat, events if events is not None else queue.SimpleQueue())
            for request, seat in zip(requests, seats, strict=True)
        ]
        self._keeper.post.send([request.request for request in requests])
        return generations

    def cancel(self, generation: Generation) -> None:
        """Stop a request; its last event says 'cancelled'. One that has ended is no error."""
        self._keeper.post.cancel(generation.request)
        self._ledger.end(generation.request, CANCELLED)

    def rebalance(self, *, is_gated: bool = True) -> RebalanceResult:
        """Plan from the trace so far and enact it beside the traffic, if the gate (where it is asked) finds that it
        pays; returns when it is done."""
        result: RebalanceResult = answer(self._service.rebalance.remote(is_gated))
        return result

    def plan(self) -> Plan:
        """The plan of the epoch that is served."""
        plan: Plan = answer(self._service.current.remote())
        return plan

    def scale(self, seats: Sequence[int]) -> None:
        """Ask for these seats to be taken and no others; returns at once."""
        answer(self._service.want.remote(tuple(sorted(seats))))

    def members(self) -> tuple[Member, ...]:
        """Who serves now, in the order of their ranks; none while they form."""
        if self._keeper.founding is None:
            return ()
        return tuple(sorted(hand.member for hand in self._keeper.hands.values()))

    def pids(self) -> dict[int, int]:
        """The process of each seat that serves."""
        hands = dict(self._keeper.hands)
        return {seat: answer(hand.ready)[2] for seat, hand in hands.items()}

    @property
    def service(self) -> Any:
        """The placement service's actor."""
        return self._service

    def progress(self) -> str:
        text: str = answer(self._service.progress.remote())
        return text

    def status(self) -> list[WorkerStatus]:
        result: list[WorkerStatus] = answer([hand.actor.status.remote() for hand in self._in_order()])
        return result

    def recent_steps(self) -> list[list[StepSeconds]]:
        """How long each rank's last steps took, by rank."""
        result: list[list[StepSeconds]] = answer([hand.actor.recent_steps.remote() for hand in self._in_order()])
        return result

    def _in_order(self) -> list[Any]:
        return [hand for _, hand in sorted(self._keeper.hands.items())]

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.stop()
        else:
            self._watch.stop()
            self._keeper.stop()
            if not head_is_gone():
                self._kill()

    def stop(self) -> None:
        """Let every rank finish and leave in step, then end the actors."""
        self._watch.stop()
        self._keeper.stop()
        refs = [hand.actor.stop.remote() for hand in self._keeper.hands.values()]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=STOP_TIMEOUT_S)
        self._kill()

    def _kill(self) -> None:
        dismiss(self._keeper.everyone)
        ray.kill(self._service)
        ray.util.remove_placement_group(self._group)
