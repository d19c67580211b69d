"""The compiled search: swap and replace experts between the units of one tree level, on the true objective.

A problem is one layer at one tree group: units are the group's children (at most 64, a bit each). Every sampled token
has the experts that this group must serve for it and the unit of its home, or no home here. The search keeps, for each
token, the units that serve it under the dispatch rule (home, then fewest), so the objective is what dispatch will do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numba as nb
import numpy as np
from numpy.typing import NDArray

from placement.dispatch import mix

MOST_UNITS = 64
EARLY_LOOK = 64
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
class Costs:
    """visit: the worth of one other unit visited per token; balance: of load max/mean rising by 1.

    step_tokens: the batch whose imbalance is judged; spread: how many standard deviations of its load count.
    """

    visit: float = 1.0
    balance: float = 1.0
    step_tokens: int = 256
    spread: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One run of the search: on how many tokens of each group, how many proposals, from how hot to how cold.

    Heat is in units of the objective: a change that makes it worse by up to a random part of the heat is taken.
    """

    tokens: int
    proposals: int
    hot: float = 0.0
    cold: float = 0.0


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


class _State(NamedTuple):
    """What the search keeps about the sample. chosen, served [S, K]; home, group, visits [S]; the rest by unit.

    start, postings: `postings_of`. masks, copies: `masks_of`. load, square [G, U]: `imbalance`; visited, tokens [G].
    """

    chosen: Any
    home: Any
    group: Any
    start: Any
    postings: Any
    masks: Any
    copies: Any
    served: Any
    visits: Any
    load: Any
    square: Any
    visited: Any
    tokens: Any


class _Trial(NamedTuple):
    """Scratch of one proposal: stamp [S] marks tokens seen; touched, visits [S] and served [S, K] hold what changes."""

    stamp: Any
    touched: Any
    served: Any
    visits: Any
    load: Any
    square: Any
    visited: Any
    same: Any


class _Weights(NamedTuple):
    visit: float
    balance: float
    step_tokens: float
    spread: float


@nb.njit(cache=True, nogil=True)
def _add_token(served: Any, sign: Any, load: Any, square: Any, same: Any) -> None:
    """Add (or take away) one token's served units to load, square [U]; same [U] is zeroed scratch."""
    for unit in served:
        if unit >= 0:
            load[unit] += sign
            square[unit] += sign * (2 * same[unit] + 1)
            same[unit] += 1
    for unit in served:
        if unit >= 0:
            same[unit] = 0


@nb.njit(cache=True, nogil=True)
def _start_state(slots: Any, chosen: Any, home: Any, group: Any, num_experts: Any) -> Any:
    num_groups, num_units = group.max() + 1, slots.shape[0]
    start, postings = postings_of(chosen, num_experts)
    masks, copies = masks_of(slots, num_experts)
    served = np.full(chosen.shape, -1, np.int8)
    visits = np.zeros(len(chosen), np.int16)
    load, square = np.zeros((num_groups, num_units)), np.zeros((num_groups, num_units))
    visited, tokens = np.zeros(num_groups), np.zeros(num_groups)
    same = np.zeros(num_units, np.int64)
    for token in range(len(chosen)):
        g = group[token]
        visits[token] = serve_units(chosen[token], home[token], masks, served[token])
        _add_token(served[token], 1.0, load[g], square[g], same)
        tokens[g] += 1
        visited[g] += visits[token]
    return _State(chosen, home, group, start, postings, masks, copies, served, visits, load, square, visited, tokens)


@nb.njit(cache=True, nogil=True)
def _objective(load: Any, square: Any, visited: Any, tokens: Any, share: Any, costs: Any) -> Any:
    total = 0.0
    for g in range(len(tokens)):
        if tokens[g]:
            total += costs.visit * visited[g] / tokens[g]
            total += costs.balance * imbalance(load[g], square[g], share, tokens[g], costs.step_tokens, costs.spread)
    return total


@nb.njit(cache=True, nogil=True)
def _serve_again(state: Any, trial: Any, expert: Any, first: Any, last: Any, step: Any, num_touched: Any) -> Any:
    """Serve again the tokens [first, last) of an expert's postings; returns how many changes the trial holds now."""
    for i in range(first, last):
        token = state.postings[state.start[expert] + i]
        if trial.stamp[token] == step:
            continue
        trial.stamp[token] = step
        served = trial.served[num_touched]
        count = serve_units(state.chosen[token], state.home[token], state.masks, served)
        changed = False
        for k in range(len(served)):
            changed = changed or served[k] != state.served[token, k]
        if changed:
            g = state.group[token]
            trial.visited[g] += count - state.visits[token]
            _add_token(state.served[token], -1.0, trial.load[g], trial.square[g], trial.same)
            _add_token(served, 1.0, trial.load[g], trial.square[g], trial.same)
            trial.visits[num_touched] = count
            trial.touched[num_touched] = token
            num_touched += 1
    return num_touched


@nb.njit(cache=True, nogil=True)
def _looks_hopeless(state: Any, trial: Any, share: Any, costs: Any, objective: Any, margin: Any) -> Any:
    """Whether the change, judged from the first eighth of its tokens, is worse than margin."""
    for g in range(len(state.tokens)):
        for unit in range(len(share)):
            trial.load[g, unit] = state.load[g, unit] + 8 * (trial.load[g, unit] - state.load[g, unit])
            trial.square[g, unit] = state.square[g, unit] + 8 * (trial.square[g, unit] - state.square[g, unit])
        trial.visited[g] = state.visited[g] + 8 * (trial.visited[g] - state.visited[g])
    guess = _objective(trial.load, trial.square, trial.visited, state.tokens, share, costs)
    for g in range(len(state.tokens)):
        for unit in range(len(share)):
            trial.load[g, unit] = state.load[g, unit] + (trial.load[g, unit] - state.load[g, unit]) / 8
            trial.square[g, unit] = state.square[g, unit] + (trial.square[g, unit] - state.square[g, unit]) / 8
        trial.visited[g] = state.visited[g] + (trial.visited[g] - state.visited[g]) / 8
    return guess - objective > margin


@nb.njit(cache=True, nogil=True)
def _try(state: Any, trial: Any, share: Any, costs: Any, into: Any, out: Any, step: Any, worst: Any, now: Any) -> Any:
    """The objective after the move that masks already show, and the number of changed tokens; inf once hopeless."""
    trial.load[:] = state.load
    trial.square[:] = state.square
    trial.visited[:] = state.visited
    num_into = state.start[into + 1] - state.start[into]
    num_out = state.start[out + 1] - state.start[out] if out >= 0 else 0
    early_into, early_out = num_into // 8, num_out // 8
    changed = 0
    if early_into + early_out >= EARLY_LOOK:
        changed = _serve_again(state, trial, into, 0, early_into, step, changed)
        changed = _serve_again(state, trial, out, 0, early_out, step, changed)
        deviations = 8 * np.sqrt(np.float64(early_into + early_out)) * costs.visit / len(state.chosen)
        if _looks_hopeless(state, trial, share, costs, now, worst + deviations):
            return np.inf, changed
    else:
        early_into, early_out = 0, 0
    changed = _serve_again(state, trial, into, early_into, num_into, step, changed)
    if out >= 0:
        changed = _serve_again(state, trial, out, early_out, num_out, step, changed)
    return _objective(trial.load, trial.square, trial.visited, state.tokens, share, costs), changed


@nb.njit(cache=True, nogil=True)
def _accept(state: Any, trial: Any, changed: Any) -> None:
    state.load[:] = trial.load
    state.square[:] = trial.square
    state.visited[:] = trial.visited
    for i in range(changed):
        token = trial.touched[i]
        state.served[token] = trial.served[i]
        state.visits[token] = trial.visits[i]


@nb.njit(cache=True, nogil=True)
def _anneal(
    slots: Any, sizes: Any, share: Any, state: Any, costs: Any, proposals: Any, hot: Any, cold: Any, seed: Any
) -> Any:
    """Threshold accepting: changes slots [U, C] in place to the best found; returns the objective before and after.

    sizes [U]: the slots that a unit really has. Only sums, products and square roots, so every machine agrees.
    """
    size, num_units = len(state.chosen), len(sizes)
    trial = _Trial(
        np.full(size, -1, np.int64),
        np.empty(size, np.int32),
        np.empty((size + 1, state.chosen.shape[1]), np.int8),
        np.empty(size, np.int16),
        state.load.copy(),
        state.square.copy(),
        state.visited.copy(),
        np.zeros(num_units, np.int64),
    )
    now = _objective(state.load, state.square, state.visited, state.tokens, share, costs)
    before, best, best_slots = now, now, slots.copy()
    word = mix(np.uint64(seed))
    for step in range(proposals):
        word = mix(word)
        one = np.int64((word >> np.uint64(8)) % np.uint64(num_units))
        row = np.int64((word >> np.uint64(32)) % np.uint64(sizes[one]))
        swap = word & ONE == 0
        word = mix(word)
        two = np.int64((word >> np.uint64(8)) % np.uint64(num_units))
        other = np.int64((word >> np.uint64(32)) % np.uint64(sizes[two]))
        out, into = slots[one, row], slots[two, other]
        if not _is_legal(state.masks, state.copies, one, two, out, into, swap):
            continue
        word = mix(word)
        heat = hot + (cold - hot) * (step / proposals)
        threshold = heat * (np.float64(word >> np.uint64(11)) / 9007199254740992.0)
        _move(state.masks, state.copies, one, two, out, into, swap, True)
        objective, changed = _try(state, trial, share, costs, into, out, step, threshold, now)
        if objective - now > threshold or (objective == now and changed == 0):
            _move(state.masks, state.copies, one, two, out, into, swap, False)
            continue
        now = objective
        _accept(state, trial, changed)
        slots[one, row] = into
        if swap:
            slots[two, other] = out
        if now < best - 1e-12:
            best = now
            best_slots[:] = slots
    slots[:] = best_slots
    return before, best


@nb.njit(cache=True, nogil=True, inline="always")
def _is_legal(masks: Any, copies: Any, one: Any, two: Any, out: Any, into: Any, swap: Any) -> Any:
    """No expert twice on a unit, none without a copy. out may be -1, an empty slot; into may not."""
    if one == two or out == into or into < 0 or copies[one, into]:
        return False
    if out < 0:
        return True
    return not copies[two, out] if swap else masks[out] & (masks[out] - ONE) != 0


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
    costs: Costs,
    stage: Stage,
    seed: int,
) -> NDArray[np.int32]:
    """Search from slots [U, C] (expert ids, -1 empty; unit u uses the first sizes[u]). Returns the best slots found.

    share [U], summing to 1, is the part of the load that each unit should carry. Every expert keeps a copy.
    """
    result = np.ascontiguousarray(slots, np.int32).copy()
    thinned = thin(sample, stage.tokens)
    if len(result) > 1 and len(thinned.chosen) and stage.proposals:
        state = _start_state(
            result,
            np.ascontiguousarray(thinned.chosen, np.int16),
            np.ascontiguousarray(thinned.home, np.int16),
            np.ascontiguousarray(thinned.group, np.uint8),
            num_experts,
        )
        _anneal(
            result,
            np.asarray(sizes, np.int64),
            np.asarray(share, np.float64),
            state,
            _Weights(costs.visit, costs.balance, float(costs.step_tokens), costs.spread),
            stage.proposals,
            stage.hot,
            stage.cold,
            seed,
        )
    return result


def thin(sample: Sample, num_tokens: int) -> Sample:
    """Every n-th token, so that about num_tokens of each group stay. The sample's order must be random."""
    step = max(1, len(sample.chosen) // (num_tokens * (int(sample.group.max(initial=0)) + 1)))
    return Sample(chosen=sample.chosen[::step], home=sample.home[::step], group=sample.group[::step])
