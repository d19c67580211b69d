"""Decide: which rank owns which expert. Frozen data and pure functions; no ray, no torch, no clock."""

from pathlib import Path

from placement.kernel_cache import drop_stale_kernels

drop_stale_kernels(Path(__file__).parent)
