"""The compiled search: swap and replace experts between the units of one tree level, on the true objective.

A problem is one layer at one tree group: units are the group's children (at most 64, a bit each). Every sampled token
has the experts that this group must serve for it and the unit of its home, or no home here. The search keeps, for each
token, the units that serve it under the dispatch rule (home, then fewest), so the objective is what dispatch will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba as nb
import numpy as np
from numpy.typing import NDArray

from placement.dispatch import mix

MOST_UNITS = 64
ONE = np.uint64(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Tokens of one problem. chosen int16 [S, K], -1 pads; home int16 [S], -1 elsewhere; group uint8 [S].

    Tokens of one group were drawn under one home policy; each group's balance is judged by itself.
    """

    chosen: NDArray[np.int16]
    home: NDArray[np.int16]
    group: NDArray[np.uint8]

    def __post_init__(self) -> None:
        assert len(self.chosen) == len(self.home) == len(self.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How hard to search: proposals tried, and the first temperature (in units of the objective).

    visit_cost: the worth of one other unit visited per token; balance_cost: of load max/mean rising by 1;
    step_tokens: the batch whose imbalance is judged, spread: how many standard deviations of it count.
    """

    proposals: int
    temperature: float = 0.002
    visit_cost: float = 1.0
    balance_cost: float = 2.0
    step_tokens: int = 256
    spread: float = 1.0


@nb.njit(cache=True, nogil=True, inline="always")
def _nth_bit(word: Any, n: Any) -> Any:
    """The n-th set bit of word, as a one-bit word."""
    for _ in range(n):
        word &= word - ONE
    return word & (~word + ONE)


@nb.njit(cache=True, nogil=True, inline="always")
def _num_bits(word: Any) -> Any:
    word = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    word = (word & np.uint64(0x3333333333333333)) + ((word >> np.uint64(2)) & np.uint64(0x3333333333333333))
    word = (word + (word >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((word * np.uint64(0x0101010101010101)) >> np.uint64(56))


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
        return _nth_bit(common, np.int64(opened % np.uint64(_num_bits(common))))
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
    return _num_bits(bit - ONE)


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
            if mask & home_bit:
                mask = home_bit
            elif mask & (mask - ONE):
                seed = mix(opened ^ (np.uint64(chosen[k]) << np.uint64(32)) ^ np.uint64(chosen[0]))
                mask = _nth_bit(mask, np.int64(seed % np.uint64(_num_bits(mask))))
            out[k] = _unit_of_bit(mask)
    return _num_bits(opened & ~home_bit)


@nb.njit(cache=True, nogil=True)
def imbalance(load: Any, square: Any, share: Any, num_tokens: Any, step_tokens: Any, spread: Any) -> Any:
    """A smooth maximum (the 16-norm) over units of load over its fair share, with `spread` deviations of a step's load.

    load, square [U]: sums over tokens of a token's experts served by the unit, and of that number squared. share [U].
    """
    total = load.sum()
    if total <= 0:
        return 1.0
    result = 0.0
    for unit in range(len(load)):
        mean = load[unit] / num_tokens
        variance = max(0.0, square[unit] / num_tokens - mean * mean)
        fair = total / num_tokens * share[unit]
        ratio = (mean + spread * np.sqrt(variance / step_tokens)) / fair
        ratio *= ratio
        ratio *= ratio
        ratio *= ratio
        result += share[unit] * ratio * ratio
    return np.sqrt(np.sqrt(np.sqrt(np.sqrt(result))))


@nb.njit(cache=True, nogil=True)
def postings_of(chosen: Any, num_experts: Any) -> Any:
    """The tokens that chose each expert: start [E + 1] and tokens; expert e has tokens[start[e] : start[e + 1]]."""
    start = np.zeros(num_experts + 1, np.int64)
    for token in range(chosen.shape[0]):
        for expert in chosen[token]:
            if expert >= 0:
                start[expert + 1] += 1
    start = np.cumsum(start)
    fill = start[:-1].copy()
    tokens = np.empty(start[-1], np.int32)
    for token in range(chosen.shape[0]):
        for expert in chosen[token]:
            if expert >= 0:
                tokens[fill[expert]] = token
                fill[expert] += 1
    return start, tokens


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


@nb.njit(cache=True, nogil=True)
def _add_token(served: Any, sign: Any, load: Any, square: Any) -> None:
    """Add (or take away) one token's served units to load, square [U]."""
    for k in range(len(served)):
        unit = served[k]
        if unit < 0:
            continue
        same, first = 0, True
        for other in range(len(served)):
            if served[other] == unit:
                same += 1
                first = first and other >= k
        load[unit] += sign
        if first:
            square[unit] += sign * same * same


@nb.njit(cache=True, nogil=True)
def _anneal(
    slots: Any,
    sizes: Any,
    share: Any,
    chosen: Any,
    home: Any,
    group: Any,
    num_experts: Any,
    proposals: Any,
    temperature: Any,
    visit_cost: Any,
    balance_cost: Any,
    step_tokens: Any,
    spread: Any,
    seed: Any,
) -> Any:
    """Threshold accepting: changes slots [U, C] in place, returns the objective before and after.

    sizes [U]: the slots that a unit really has. Only sums, products and square roots, so every machine agrees.
    """
    num_units, top_k = slots.shape[0], chosen.shape[1]
    num_groups = group.max() + 1
    start, postings = postings_of(chosen, num_experts)
    masks, copies = masks_of(slots, num_experts)
    served = np.full(chosen.shape, -1, np.int8)
    visits = np.zeros(len(chosen), np.int16)
    load, square = np.zeros((num_groups, num_units)), np.zeros((num_groups, num_units))
    tokens_of = np.zeros(num_groups)
    visited = np.zeros(num_groups)
    for token in range(len(chosen)):
        visits[token] = serve_units(chosen[token], home[token], masks, served[token])
        _add_token(served[token], 1.0, load[group[token]], square[group[token]])
        tokens_of[group[token]] += 1
        visited[group[token]] += visits[token]
    objective = 0.0
    for g in range(num_groups):
        if tokens_of[g]:
            objective += visit_cost * visited[g] / tokens_of[g]
            objective += balance_cost * imbalance(load[g], square[g], share, tokens_of[g], step_tokens, spread)
    first_objective = objective
    best_objective, best_slots = objective, slots.copy()
    stamp = np.full(len(chosen), -1, np.int64)
    touched = np.empty(len(chosen), np.int32)
    new_served = np.empty((len(chosen), top_k), np.int8)
    new_visits = np.empty(len(chosen), np.int16)
    new_load, new_square, new_visited = load.copy(), square.copy(), visited.copy()
    state = mix(np.uint64(seed))
    for step in range(proposals):
        state = mix(state)
        one = np.int64(state % np.uint64(num_units))
        row = np.int64((state >> np.uint64(20)) % np.uint64(sizes[one]))
        state = mix(state)
        two = np.int64(state % np.uint64(num_units))
        other = np.int64((state >> np.uint64(20)) % np.uint64(sizes[two]))
        state = mix(state)
        out, into = slots[one, row], slots[two, other]
        swap = state & np.uint64(1) == 0
        if one == two or out == into or into < 0 or copies[one, into]:
            continue
        if swap and out >= 0 and copies[two, out]:
            continue
        if not swap and out >= 0 and masks[out] & ~(ONE << np.uint64(one)) == 0 and copies[one, out] == 1:
            continue
        _move(masks, copies, one, two, out, into, swap, True)
        num_touched = 0
        new_load[:] = load
        new_square[:] = square
        new_visited[:] = visited
        for which in range(2):
            expert = into if which == 0 else out
            if expert < 0:
                continue
            for i in range(start[expert], start[expert + 1]):
                token = postings[i]
                if stamp[token] == step:
                    continue
                stamp[token] = step
                g = group[token]
                count = serve_units(chosen[token], home[token], masks, new_served[num_touched])
                changed = count != visits[token]
                for k in range(top_k):
                    changed = changed or new_served[num_touched, k] != served[token, k]
                if changed:
                    new_visited[g] += count - visits[token]
                    _add_token(served[token], -1.0, new_load[g], new_square[g])
                    _add_token(new_served[num_touched], 1.0, new_load[g], new_square[g])
                    new_visits[num_touched] = count
                    touched[num_touched] = token
                    num_touched += 1
        candidate = 0.0
        for g in range(num_groups):
            if tokens_of[g]:
                candidate += visit_cost * new_visited[g] / tokens_of[g]
                candidate += balance_cost * imbalance(
                    new_load[g], new_square[g], share, tokens_of[g], step_tokens, spread
                )
        cooling = 1.0 - step / proposals
        threshold = temperature * cooling * cooling * (np.float64(state >> np.uint64(11)) / 9007199254740992.0)
        if candidate - objective < threshold:
            objective = candidate
            load[:] = new_load
            square[:] = new_square
            visited[:] = new_visited
            for i in range(num_touched):
                served[touched[i]] = new_served[i]
                visits[touched[i]] = new_visits[i]
            slots[one, row] = into
            if swap:
                slots[two, other] = out
            if objective < best_objective - 1e-12:
                best_objective = objective
                best_slots[:] = slots
        else:
            _move(masks, copies, one, two, out, into, swap, False)
    slots[:] = best_slots
    return first_objective, best_objective


@nb.njit(cache=True, nogil=True)
def _move(masks: Any, copies: Any, one: Any, two: Any, out: Any, into: Any, swap: Any, forward: Any) -> None:
    """Put `into` in the place of `out` on unit one (in a swap, `out` in its place on unit two), or take that back."""
    change = 1 if forward else -1
    copies[one, into] += change
    if out >= 0:
        copies[one, out] -= change
    if swap:
        copies[two, into] -= change
        if out >= 0:
            copies[two, out] += change
    for which in range(4):
        unit = one if which < 2 else two
        expert = into if which % 2 == 0 else out
        if expert >= 0:
            bit = ONE << np.uint64(unit)
            masks[expert] = masks[expert] | bit if copies[unit, expert] else masks[expert] & ~bit


def refine(
    slots: NDArray[np.int32],
    sizes: NDArray[np.int64],
    share: NDArray[np.float64],
    sample: Sample,
    num_experts: int,
    effort: Effort,
    seed: int,
) -> NDArray[np.int32]:
    """Search from slots [U, C] (expert ids, -1 empty; unit u uses the first sizes[u]). Returns the best slots found.

    share [U], summing to 1, is the part of the load that each unit should carry. Every expert keeps a copy.
    """
    result = np.ascontiguousarray(slots, np.int32).copy()
    if len(result) > 1 and len(sample.chosen) and effort.proposals:
        _anneal(
            result,
            np.asarray(sizes, np.int64),
            np.asarray(share, np.float64),
            np.ascontiguousarray(sample.chosen, np.int16),
            np.ascontiguousarray(sample.home, np.int16),
            np.ascontiguousarray(sample.group, np.uint8),
            num_experts,
            effort.proposals,
            effort.temperature,
            effort.visit_cost,
            effort.balance_cost,
            float(effort.step_tokens),
            effort.spread,
            seed,
        )
    return result
