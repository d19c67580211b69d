"""The compiled search itself: the state of a sample under the dispatch rule, and threshold accepting over changes.

A change swaps two experts between units or replaces a copy; only the tokens that chose one of the two are served again,
and a change that looks hopeless after an eighth of them is dropped there. `refine` is the way in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba as nb
import numpy as np

from placement.cover import ONE, masks_of, num_bits, serve_in_nodes, serve_units
from placement.dispatch import mix

EARLY_LOOK = 64


@nb.njit(cache=True, nogil=True)
def imbalance(load: Any, square: Any, share: Any, num_tokens: Any, costs: Any) -> Any:
    """A smooth maximum (the 16-norm) over units of load over its fair share, with some deviations on top.

    load [U + 1, U]: (token, expert) pairs by the token's home (last: no home here) and the unit that serves them.
    square [U]: the number of a token's experts that a unit serves, squared, summed over tokens. share [U].
    A unit's load deviates with the step's tokens, and with how many tokens happen to be at home at each unit.
    """
    num_units = len(share)
    of_home = load.sum(axis=1)
    total = of_home.sum()
    if total <= 0:
        return 1.0
    result = 0.0
    for unit in range(num_units):
        mean, homes = 0.0, 0.0
        for home in range(num_units):
            mean += load[home, unit]
            lump = load[home, unit] - share[unit] * of_home[home]
            homes += lump * lump
        mean = (mean + load[num_units, unit]) / num_tokens
        variance = max(0.0, square[unit] / num_tokens - mean * mean) / costs.step_tokens
        deviation = costs.spread * np.sqrt(variance) + costs.home_spread * np.sqrt(homes) / num_tokens
        ratio = (mean + deviation) / (total / num_tokens * share[unit])
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


class Weights(NamedTuple):
    visit: float
    unit_visit: float
    balance: float
    step_tokens: float
    spread: float
    home_spread: float


class _State(NamedTuple):
    """What the search keeps about the sample. chosen, served [S, K]; home, group, visits [S]; the rest by unit.

    start, postings: `postings_of`. masks, copies: `masks_of`. load [G, U + 1, U], square [G, U]: `imbalance`; visited,
    tokens [G]. fewest [E]: the copies that must stay.
    visits, visited: the cost of visits, of a token and summed. in_nodes: whether units lie in nodes; then node_of [U],
    node_bits [N] its units, node_masks [E] as masks.
    """

    chosen: Any
    home: Any
    group: Any
    start: Any
    postings: Any
    masks: Any
    copies: Any
    fewest: Any
    served: Any
    visits: Any
    load: Any
    square: Any
    visited: Any
    tokens: Any
    in_nodes: Any
    node_of: Any
    node_bits: Any
    node_masks: Any
    costs: Any


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
def start_state(slots: Any, node_of: Any, chosen: Any, home: Any, group: Any, fewest: Any, costs: Any) -> Any:
    """The state at slots [U, C]. node_of [U]: each unit's node; as many nodes as units means that units are nodes."""
    num_groups, num_units, num_nodes = group.max() + 1, slots.shape[0], node_of.max() + 1
    num_experts = len(fewest)
    start, postings = postings_of(chosen, num_experts)
    masks, copies = masks_of(slots, num_experts)
    node_bits = np.zeros(num_nodes, np.uint64)
    for unit in range(num_units):
        node_bits[node_of[unit]] |= ONE << np.uint64(unit)
    node_masks = np.zeros(num_experts, np.uint64)
    for expert in range(num_experts):
        for node in range(num_nodes):
            if masks[expert] & node_bits[node]:
                node_masks[expert] |= ONE << np.uint64(node)
    state = _State(
        chosen,
        home,
        group,
        start,
        postings,
        masks,
        copies,
        fewest,
        np.full(chosen.shape, -1, np.int8),
        np.zeros(len(chosen)),
        np.zeros((num_groups, num_units + 1, num_units)),
        np.zeros((num_groups, num_units)),
        np.zeros(num_groups),
        np.zeros(num_groups),
        num_nodes < num_units,
        node_of,
        node_bits,
        node_masks,
        costs,
    )
    same = np.zeros(num_units, np.int64)
    for token in range(len(chosen)):
        g = group[token]
        if state.in_nodes:
            nodes, units = serve_in_nodes(
                chosen[token], home[token], masks, node_masks, node_bits, node_of, state.served[token]
            )
            state.visits[token] = costs.visit * nodes + costs.unit_visit * units
        else:
            state.visits[token] = costs.visit * serve_units(chosen[token], home[token], masks, state.served[token])
        _add_token(state.served[token], 1.0, state.load[g, home[token]], state.square[g], same)
        state.tokens[g] += 1
        state.visited[g] += state.visits[token]
    return state


@nb.njit(cache=True, nogil=True)
def _objective(load: Any, square: Any, visited: Any, tokens: Any, share: Any, costs: Any) -> Any:
    total = 0.0
    for g in range(len(tokens)):
        if tokens[g]:
            total += visited[g] / tokens[g]
            total += costs.balance * imbalance(load[g], square[g], share, tokens[g], costs)
    return total


@nb.njit(cache=True, nogil=True)
def _serve_again(state: Any, trial: Any, expert: Any, first: Any, last: Any, step: Any, num_touched: Any) -> Any:
    """Serve again the tokens [first, last) of an expert's postings; returns how many changes the trial holds now."""
    chosen, home, masks, in_nodes = state.chosen, state.home, state.masks, state.in_nodes
    node_masks, node_bits, node_of = state.node_masks, state.node_bits, state.node_of
    visit, unit_visit = state.costs.visit, state.costs.unit_visit
    begin = state.start[expert]
    for i in range(begin + first, begin + last):
        token = state.postings[i]
        if trial.stamp[token] == step:
            continue
        trial.stamp[token] = step
        served, before = trial.served[num_touched], state.served[token]
        if in_nodes:
            nodes, units = serve_in_nodes(chosen[token], home[token], masks, node_masks, node_bits, node_of, served)
            cost = visit * nodes + unit_visit * units
        else:
            cost = visit * serve_units(chosen[token], home[token], masks, served)
        changed = False
        for k in range(len(served)):
            changed = changed or served[k] != before[k]
        if changed:
            g = state.group[token]
            trial.visited[g] += cost - state.visits[token]
            load = trial.load[g, home[token]]
            _add_token(before, -1.0, load, trial.square[g], trial.same)
            _add_token(served, 1.0, load, trial.square[g], trial.same)
            trial.visits[num_touched] = cost
            trial.touched[num_touched] = token
            num_touched += 1
    return num_touched


@nb.njit(cache=True, nogil=True)
def _stretch(state: Any, trial: Any, factor: Any) -> None:
    """Multiply what the trial changes by factor."""
    trial.load[:] = state.load + factor * (trial.load - state.load)
    trial.square[:] = state.square + factor * (trial.square - state.square)
    trial.visited[:] = state.visited + factor * (trial.visited - state.visited)


@nb.njit(cache=True, nogil=True)
def _looks_hopeless(state: Any, trial: Any, share: Any, objective: Any, margin: Any) -> Any:
    """Whether the change, judged from the first eighth of its tokens, is worse than margin."""
    _stretch(state, trial, 8.0)
    guess = _objective(trial.load, trial.square, trial.visited, state.tokens, share, state.costs)
    _stretch(state, trial, 0.125)
    return guess - objective > margin


@nb.njit(cache=True, nogil=True)
def _try(state: Any, trial: Any, share: Any, into: Any, out: Any, step: Any, worst: Any, now: Any) -> Any:
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
        deviations = 8 * np.sqrt(np.float64(early_into + early_out)) * state.costs.visit / len(state.chosen)
        if _looks_hopeless(state, trial, share, now, worst + deviations):
            return np.inf, changed
    else:
        early_into, early_out = 0, 0
    changed = _serve_again(state, trial, into, early_into, num_into, step, changed)
    if out >= 0:
        changed = _serve_again(state, trial, out, early_out, num_out, step, changed)
    return _objective(trial.load, trial.square, trial.visited, state.tokens, share, state.costs), changed


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
def _new_trial(state: Any, num_units: Any) -> Any:
    size = len(state.chosen)
    return _Trial(
        np.full(size, -1, np.int64),
        np.empty(size, np.int32),
        np.empty((size + 1, state.chosen.shape[1]), np.int8),
        np.empty(size),
        state.load.copy(),
        state.square.copy(),
        state.visited.copy(),
        np.zeros(num_units, np.int64),
    )


@nb.njit(cache=True, nogil=True)
def anneal(
    slots: Any,
    sizes: Any,
    share: Any,
    state: Any,
    proposals: Any,
    hot: Any,
    cold: Any,
    steady: Any,
    seed: Any,
    log: Any,
) -> Any:
    """Threshold accepting: changes slots [U, C] in place to the best found; returns how many changes led there.

    sizes [U]: the slots that a unit really has. log [n, 5]: the changes taken, (unit, row, unit, row, whether a swap).
    Only sums, products and square roots, so every machine agrees.
    """
    num_units = len(sizes)
    trial = _new_trial(state, num_units)
    now = _objective(state.load, state.square, state.visited, state.tokens, share, state.costs)
    best, best_slots, taken, best_taken = now, slots.copy(), 0, 0
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
        if not _is_legal(state, one, two, out, into, swap):
            continue
        word = mix(word)
        heat = hot + (cold - hot) * (step / proposals)
        threshold = heat if steady else heat * (np.float64(word >> np.uint64(11)) / 9007199254740992.0)
        _move(state, one, two, out, into, swap, True)
        objective, changed = _try(state, trial, share, into, out, step, threshold, now)
        if objective - now > threshold or (objective == now and changed == 0):
            _move(state, one, two, out, into, swap, False)
            continue
        now = objective
        _accept(state, trial, changed)
        slots[one, row] = into
        if swap:
            slots[two, other] = out
        if taken < len(log):
            log[taken] = (one, row, two, other, np.int64(swap))
        taken += 1
        if now < best - 1e-12:
            best, best_taken = now, taken
            best_slots[:] = slots
    slots[:] = best_slots
    return best_taken


@nb.njit(cache=True, nogil=True, inline="always")
def _is_legal(state: Any, one: Any, two: Any, out: Any, into: Any, swap: Any) -> Any:
    """No expert twice on a unit, none with fewer copies than it must have. out may be -1, an empty slot."""
    if one == two or out == into or into < 0 or state.copies[one, into]:
        return False
    if out < 0:
        return True
    return not state.copies[two, out] if swap else num_bits(state.masks[out]) > state.fewest[out]


@nb.njit(cache=True, nogil=True)
def _move(state: Any, one: Any, two: Any, out: Any, into: Any, swap: Any, forward: Any) -> None:
    """Put `into` in the place of `out` on unit one (in a swap, `out` in its place on unit two), or take that back."""
    change = 1 if forward else -1
    copies = state.copies
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
            _set_bit(state.masks, expert, unit, copies[unit, expert] > 0)
            node = state.node_of[unit]
            _set_bit(state.node_masks, expert, node, state.masks[expert] & state.node_bits[node] != 0)


@nb.njit(cache=True, nogil=True, inline="always")
def _set_bit(masks: Any, expert: Any, unit: Any, on: Any) -> None:
    bit = ONE << np.uint64(unit)
    masks[expert] = masks[expert] | bit if on else masks[expert] & ~bit
