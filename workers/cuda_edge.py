"""The link of a device; on a GPU with host memory that CUDA did not pin, behind a small ring of pinned chunks."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from workers.bounce_link import BounceLink
from workers.bounce_ring import BounceRing
from workers.cuda_runtime import bare_submit
from workers.links import Arrival, CudaArrival, CudaLink, DirectLink, Link
from workers.pinning import HostRows, clear_error

logger = logging.getLogger(__name__)
CHUNK_BYTES = 4 << 20
URGENT_CHUNKS, PATIENT_CHUNKS = 8, 2
# One core copies some 10 GB/s.
URGENT_THREADS, PATIENT_THREADS = 4, 1


class CudaEdge:
    """Pinned chunks, and one of a link's two streams for what goes on from them. waits_for: a stream whose copies are
    there before a batch begins. RuntimeError where CUDA pins not even the chunks."""

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream,
        *,
        num_chunks: int,
        chunk_bytes: int,
        waits_for: torch.cuda.Stream | None = None,
    ) -> None:
        self.chunks = torch.empty((num_chunks, chunk_bytes), dtype=torch.uint8, pin_memory=True).unbind()
        self._device = device
        self._stream = stream
        self._waits_for = waits_for
        self._submit = bare_submit(device)

    def begin(self, after: Any) -> None:
        if after is not None:
            self._stream.wait_event(after.event)
        if self._waits_for is not None:
            self._stream.wait_stream(self._waits_for)

    def send(self, target: torch.Tensor, chunk: torch.Tensor) -> Arrival:
        # A thread of its own starts on the first device. Who waits for a chunk sleeps: its core is better used.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            if self._submit is not None:
                self._submit(target, chunk, self._stream.cuda_stream, len(chunk))
            else:
                with torch.cuda.stream(self._stream):
                    target.copy_(chunk, non_blocking=True)
            event.record(self._stream)
        return CudaArrival(event)


def link_for(device: torch.device, memory: HostRows) -> Link:
    """The link from memory to a device."""
    if device.type != "cuda":
        return DirectLink()
    link = CudaLink(device)
    if memory.is_pinned:
        return link
    try:
        return bounce(link, device, memory.pinned)
    except RuntimeError as error:
        clear_error()
        logger.warning(
            "CUDA does not pin %d MiB for a bounce ring either (%s): copies from memory that is not pinned hold up the "
            "thread that asks for them; `moetis doctor` measures them",
            (URGENT_CHUNKS + PATIENT_CHUNKS) * CHUNK_BYTES >> 20,
            str(error).splitlines()[0],
        )
        return link


def bounce(
    link: CudaLink,
    device: torch.device,
    pinned: range,
    *,
    num_chunks: int = URGENT_CHUNKS,
    chunk_bytes: int = CHUNK_BYTES,
    num_threads: int = URGENT_THREADS,
) -> BounceLink:
    """A link with rings for what does not begin at the pinned addresses. RuntimeError where CUDA does not pin them."""
    first, second = link.urgent, link.patient
    urgent = CudaEdge(device, first, num_chunks=num_chunks, chunk_bytes=chunk_bytes)
    patient = CudaEdge(device, second, num_chunks=PATIENT_CHUNKS, chunk_bytes=chunk_bytes, waits_for=first)
    # The thread that serves needs a core too.
    threads = max(1, min(num_threads, len(os.sched_getaffinity(0)) - 1))
    goes_first = BounceRing(urgent, num_threads=threads)
    return BounceLink(
        link,
        urgent=goes_first,
        patient=BounceRing(patient, num_threads=PATIENT_THREADS, yields_to=goes_first),
        pinned=pinned,
    )
