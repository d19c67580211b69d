"""Heads: what the sender of a run says of each expert before any comes, so that no other one can pass for it.

Messages are of one size, whatever they say: gloo ends the process of who gets more bytes than it waits for, as could be
where the ends are in different rounds.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from placement.core import ExpertId
from workers.offers import NOTHING, Offer

# Said in place of an epoch by who can't send, so that the other end need not wait.
NOTHING_COMES = (1 << 64) - 1
# Each message wakes threads at both ends, which take the interpreter from those that serve. The blobs of a run stay in
# their places until it is over, for which the smallest slab must have the rows.
MOST_IN_A_RUN = 8
_FORM = struct.Struct(">Qii16s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """epoch: which the expert is for; digest: the checksum of its blob; offer: where that lies."""

    epoch: int
    expert: ExpertId
    digest: bytes = bytes(16)
    offer: Offer = NOTHING

    NUM_BYTES = _FORM.size + Offer.NUM_BYTES

    def pack(self) -> bytes:
        return _FORM.pack(self.epoch, self.expert.layer, self.expert.expert, self.digest) + self.offer.pack()

    @staticmethod
    def unpack(raw: bytes) -> Head:
        epoch, layer, expert, digest = _FORM.unpack(raw[: _FORM.size])
        return Head(epoch=epoch, expert=ExpertId(layer, expert), digest=digest, offer=Offer.unpack(raw[_FORM.size :]))


def no_heads() -> torch.Tensor:
    """Room for the message of any run: [MOST_IN_A_RUN * NUM_BYTES] uint8."""
    return torch.zeros(MOST_IN_A_RUN * Head.NUM_BYTES, dtype=torch.uint8)


def pack_heads(heads: Sequence[Head]) -> torch.Tensor:
    """The message of a run."""
    message, raw = no_heads(), bytearray(b"".join(head.pack() for head in heads))
    message[: len(raw)] = torch.frombuffer(raw, dtype=torch.uint8)
    return message


def unpack_heads(message: torch.Tensor, count: int) -> list[Head]:
    """The first `count` heads of a message."""
    return [Head.unpack(bytes(raw)) for raw in message.view(MOST_IN_A_RUN, Head.NUM_BYTES)[:count].numpy()]
