"""Decide: which rank owns which expert. Frozen data and pure functions; no ray, no torch, no clock."""
