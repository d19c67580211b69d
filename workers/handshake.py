"""What two ranks agree on before experts pass between their GPUs: over gloo, a message and an answer.

The sender offers for an epoch, and says from which expert on; the receiver makes room and says yes. Each tells besides
how many parcels it can have begun at the same time, so that neither waits for more than the other does.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeVar

import torch

from placement.core import ExpertId
from placement.errors import ExchangeError, MigrationError, MoetisError, StaleEpochError
from placement.migration import Move
from workers.group import Group
from workers.heads import NOTHING_COMES

# The answer of who does not take what is offered.
NO = 0
# Epoch, layer and expert; how many parcels.
_FORM = struct.Struct(">QiiB")
T = TypeVar("T")


class Handshake:
    """This rank's end, over a gloo group of its own. most: how many parcels it can have begun, 1 to 255."""

    def __init__(self, signals: Group, *, rank: int, most: int) -> None:
        self._signals = signals
        self._rank = rank
        self._most = most

    def offer(self, epoch: int, move: Move) -> int:
        """Offer a parcel that begins with a move; returns how many its receiver can have begun.

        Raises MigrationError where it does not take it.
        """
        said = torch.zeros(1, dtype=torch.uint8)
        try:
            self._say(epoch, move)
            self._signals.receive(said, move.target.rank)
        except ExchangeError as error:
            raise failed(move, error) from error
        if int(said) == NO:
            raise MigrationError(f"rank {move.target.rank} does not take {move.expert} for epoch {epoch}")
        return int(said)

    def withhold(self, move: Move) -> None:
        """Nothing comes: this rank has not got what it was to send."""
        try:
            self._say(NOTHING_COMES, move)
        except ExchangeError as error:
            raise failed(move, error) from error

    def take(self, epoch: int, move: Move, make_room: Callable[[], T]) -> tuple[T, int]:
        """Wait for the offer of a parcel and say yes: what make_room returned, and how many its sender can have begun.

        Raises StaleEpochError for another epoch, MigrationError where nothing comes or another expert, and what
        make_room raises.
        """
        source = move.source.rank
        message = torch.empty(_FORM.size, dtype=torch.uint8)
        try:
            self._signals.receive(message, source)
            theirs, layer, expert, most = _FORM.unpack(message.numpy().tobytes())
            if theirs == NOTHING_COMES:
                raise MigrationError(f"rank {source} has not got all that it was to send: {move.expert}")
            try:
                if theirs != epoch:
                    raise StaleEpochError(
                        f"rank {self._rank} moves to epoch {epoch}, but rank {source} sends for epoch {theirs}"
                    )
                if (layer, expert) != (move.expert.layer, move.expert.expert):
                    raise MigrationError(
                        f"rank {self._rank} waits for {move.expert}, but rank {source} sends {ExpertId(layer, expert)}"
                    )
                room = make_room()
            except MoetisError:
                self._answer(NO, source)
                raise
            self._answer(self._most, source)
        except ExchangeError as error:
            raise failed(move, error) from error
        return room, most

    def _say(self, epoch: int, move: Move) -> None:
        message = _FORM.pack(epoch, move.expert.layer, move.expert.expert, self._most)
        self._signals.send(torch.frombuffer(bytearray(message), dtype=torch.uint8), move.target.rank)

    def _answer(self, answer: int, source: int) -> None:
        self._signals.send(torch.tensor([answer], dtype=torch.uint8), source)


def failed(move: Move, error: ExchangeError) -> MigrationError:
    """What a round says of a failed transfer."""
    return MigrationError(f"copying {move.expert} to rank {move.target.rank} failed: {error}")
