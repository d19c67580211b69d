"""Serving with bits: the dispatch rule over at most 64 units, a bit each, as the search and the homes need it."""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
from numba.extending import intrinsic

from placement.dispatch import mix

MOST_UNITS = 64
ONE = np.uint64(1)


@nb.njit(cache=True, nogil=True, inline="always")
def _nth_bit(word: Any, n: Any) -> Any:
    """The n-th set bit of word, as a one-bit word."""
    for _ in range(n):
        word &= word - ONE
    return word & (~word + ONE)


@intrinsic
def _count_ones(typing_context: Any, word: Any) -> Any:
    """The processor's own count of set bits: uint64 -> uint64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return nb.types.uint64(nb.types.uint64), generate


@nb.njit(cache=True, nogil=True, inline="always")
def num_bits(word: Any) -> Any:
    return np.int64(_count_ones(word))


@nb.njit(cache=True, nogil=True)
def _cover(chosen: Any, masks: Any, opened: Any) -> Any:
    """Units to open beyond opened so that every expert is served: one if one will do, a pair if a pair, else greedy."""
    first = -1
    common = ~np.uint64(0)
    for k in range(len(chosen)):
        if chosen[k] >= 0 and masks[chosen[k]] & opened == 0:
            first = k if first < 0 else first
            common &= masks[chosen[k]]
    if common:
        return _nth_bit(common, np.int64(opened % np.uint64(num_bits(common))))
    choices = masks[chosen[first]]
    while choices:
        one = choices & (~choices + ONE)
        choices ^= one
        common = ~np.uint64(0)
        for k in range(len(chosen)):
            if chosen[k] >= 0 and masks[chosen[k]] & (opened | one) == 0:
                common &= masks[chosen[k]]
        if common:
            return one | (common & (~common + ONE))
    added = np.uint64(0)
    while True:
        best, most = np.uint64(0), 0
        for k in range(len(chosen)):
            if chosen[k] >= 0 and masks[chosen[k]] & (opened | added) == 0:
                choices = masks[chosen[k]]
                while choices:
                    unit = choices & (~choices + ONE)
                    choices ^= unit
                    served = 0
                    for other in range(len(chosen)):
                        if chosen[other] >= 0:
                            mask = masks[chosen[other]]
                            served += (mask & unit != 0) and (mask & (opened | added) == 0)
                    if served > most:
                        best, most = unit, served
        if most == 0:
            return added
        added |= best


@nb.njit(cache=True, nogil=True, inline="always")
def _unit_of_bit(bit: Any) -> Any:
    return num_bits(bit - ONE)


@nb.njit(cache=True, nogil=True)
def serve_units(chosen: Any, home: Any, masks: Any, out: Any) -> Any:
    """The unit that serves each chosen expert, written to out [K] (-1 for none). Returns the other units visited.

    masks [E]: bit u set where unit u holds the expert. The same rule as `dispatch.serve_token`, with units for nodes.
    """
    home_bit = ONE << np.uint64(home) if home >= 0 else np.uint64(0)
    opened = home_bit
    for k in range(len(chosen)):
        if chosen[k] >= 0:
            mask = masks[chosen[k]]
            if mask & (mask - ONE) == 0:
                opened |= mask
    for k in range(len(chosen)):
        if chosen[k] >= 0 and masks[chosen[k]] & opened == 0:
            opened |= _cover(chosen, masks, opened)
            break
    for k in range(len(chosen)):
        out[k] = -1
        if chosen[k] >= 0:
            mask = masks[chosen[k]] & opened
            if mask & (mask - ONE):
                seed = mix(opened ^ (np.uint64(chosen[k]) << np.uint64(32)) ^ np.uint64(chosen[0]))
                mask = _nth_bit(mask, np.int64(seed % np.uint64(num_bits(mask))))
            out[k] = _unit_of_bit(mask)
    return num_bits(opened & ~home_bit)


@nb.njit(cache=True, nogil=True)
def serve_in_nodes(
    chosen: Any, home: Any, masks: Any, node_masks: Any, node_bits: Any, node_of: Any, out: Any
) -> tuple[Any, Any]:
    """As `serve_units` for units that lie in nodes: fewest nodes, then few units. Returns both numbers visited."""
    home_node = node_of[home] if home >= 0 else -1
    nodes = serve_units(chosen, home_node, node_masks, out)
    home_bit = ONE << np.uint64(home) if home >= 0 else np.uint64(0)
    near = node_bits[home_node] if home >= 0 else np.uint64(0)
    for k in range(len(chosen)):
        if chosen[k] >= 0:
            near |= node_bits[out[k]]
    visited = home_bit
    for k in range(len(chosen)):
        if chosen[k] >= 0:
            mask = masks[chosen[k]] & near
            if mask & (mask - ONE) == 0:
                visited |= mask
    for k in range(len(chosen)):
        if chosen[k] >= 0:
            mask = masks[chosen[k]] & near
            if mask & visited:
                mask &= visited
            if mask & (mask - ONE):
                seed = mix(visited ^ (np.uint64(chosen[k]) << np.uint64(32)) ^ np.uint64(chosen[0]))
                mask = _nth_bit(mask, np.int64(seed % np.uint64(num_bits(mask))))
            visited |= mask
            out[k] = _unit_of_bit(mask)
    return nodes, num_bits(visited & ~home_bit)


@nb.njit(cache=True, nogil=True)
def masks_of(slots: Any, num_experts: Any) -> Any:
    """slots [U, C] expert ids, -1 empty -> masks uint64 [E] of the units that hold each, and copies uint8 [U, E]."""
    masks = np.zeros(num_experts, np.uint64)
    copies = np.zeros((slots.shape[0], num_experts), np.uint8)
    for unit in range(slots.shape[0]):
        for expert in slots[unit]:
            if expert >= 0:
                masks[expert] |= ONE << np.uint64(unit)
                copies[unit, expert] += 1
    return masks, copies
