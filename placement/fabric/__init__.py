"""Readers of what other systems know of a cluster's network: text in, a `Topology` out. See `reading.read_topology`."""
