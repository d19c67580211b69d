"""The memory of the slots: one array on the device, as large as there is room for."""

from __future__ import annotations

import logging

import torch

from workers.memory import Memory

logger = logging.getLogger(__name__)


class SlotArray:
    """whole [num_slots, blob_bytes] uint8, and its rows; fewer slots where memory has no room for so many."""

    def __init__(self, num_slots: int, *, blob_bytes: int, device: torch.device, memory: Memory) -> None:
        self._blob_bytes = blob_bytes
        self._device = device
        self._memory = memory
        self._allocate_most(num_slots, num_slots)

    def replace(self, num_slots: int) -> None:
        """Have so many from now on, with nothing in them. Nothing may be computed or copied with the old ones, whose
        memory goes back first; where it does not suffice the new ones are fewer."""
        before = len(self.whole)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        # Layers have views of the old slots until they next run.
        self.rows.clear()
        self.whole.untyped_storage().resize_(0)
        self._memory.claim("slots", 0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._allocate_most(num_slots, before)

    def _allocate_most(self, wanted: int, before: int) -> None:
        """So many slots as wanted; as many as before where there is no room for more; half, a quarter, ... of that."""
        num_slots = wanted
        while True:
            try:
                self._allocate(num_slots)
                break
            except torch.OutOfMemoryError:
                if num_slots == 1:
                    raise
            num_slots = before if num_slots > before else num_slots // 2
        if num_slots < wanted:
            logger.warning("memory has no room for %d slots of the expert cache; there are %d", wanted, num_slots)

    def _allocate(self, num_slots: int) -> None:
        self._memory.claim("slots", num_slots * self._blob_bytes)
        self.whole = torch.zeros((num_slots, self._blob_bytes), dtype=torch.uint8, device=self._device)
        if self._device.type == "cuda":
            # The zeros are written by another stream than what is copied there next.
            torch.cuda.current_stream(self._device).synchronize()
        self.rows = list(self.whole.unbind())
