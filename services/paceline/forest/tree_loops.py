"""Loops over trees: what a guess is worth, how guesses are added and picked, and what a commit leaves of them.

From a source's confidence in a guess to the probability that the target agrees, learned online: the margin of a guess
is the log odds of its confidence, its score against all its rivals. Per source,

    P(match) = sigmoid(slope * margin + intercept + offset of the session),

fitted by recursive logistic regression (one Newton step per observation, with forgetting). Only guesses whose parent
was committed are observed: there the target's own token is known, verified or not. Guesses further down were never
reached and teach nothing.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.forest.records import (
    FULL,
    GONE,
    LEAST_CONFIDENCE,
    NONE,
    RECENT,
    RING,
    ROOT,
    Arrays,
    Bools,
    Floats,
    Ints,
    kernel,
)

# Odds beyond these are not believed: no guess is sure, none impossible.
MAX_MARGIN = 6.0
# Start: a source is believed, and this uncertain; and how fast old observations lose weight.
SLOPE_VARIANCE, INTERCEPT_VARIANCE, OFFSET_VARIANCE = 0.25, 0.5, 0.3
DRIFT = 2e-5
OFFSET_DRIFT = 2e-3
LEAST_SLOPE = 0.1


@kernel
def margin(confidence: float) -> float:
    """Log odds, bounded."""
    if confidence <= 0.0:
        return -MAX_MARGIN
    if confidence >= 1.0:
        return MAX_MARGIN
    return max(-MAX_MARGIN, min(MAX_MARGIN, math.log(confidence / (1.0 - confidence))))


@kernel
def sigmoid(value: float) -> float:
    """From log odds to a probability."""
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0.0 else math.exp(value) / (1.0 + math.exp(value))


@kernel
def probability(judge: Any, calibrations: Any, confidence: float) -> float:
    """Probability that the target chooses a guess, given that it gets there."""
    if judge.calibration == NONE:
        return confidence
    known = calibrations[judge.calibration]
    return sigmoid(known.slope * margin(confidence) + known.intercept + judge.offset)


@kernel
def observe(judge: Any, calibrations: Any, confidence: float, matched: float) -> None:
    """Learns from one guess below a committed token: it matched, 1, or did not, 0, or would with a probability."""
    if judge.calibration == NONE:
        return
    known = calibrations[judge.calibration]
    x = margin(confidence)
    chance = sigmoid(known.slope * x + known.intercept + judge.offset)
    curvature = chance * (1.0 - chance)
    toward_slope = known.var_slope * x + known.covariance
    toward_intercept = known.covariance * x + known.var_intercept
    scale = 1.0 / (1.0 + curvature * (x * toward_slope + toward_intercept + judge.variance))
    error = (matched - chance) * scale
    known.slope = max(LEAST_SLOPE, known.slope + toward_slope * error)
    known.intercept += toward_intercept * error
    judge.offset += judge.variance * error
    shrink = curvature * scale
    known.var_slope += DRIFT - shrink * toward_slope**2
    known.covariance -= shrink * toward_slope * toward_intercept
    known.var_intercept += DRIFT - shrink * toward_intercept**2
    judge.variance = min(OFFSET_VARIANCE, judge.variance + OFFSET_DRIFT - shrink * judge.variance**2)


@kernel
def find(names: Any, nodes: Any, count: int, node_id: int) -> int:
    """Slot of an id, ~position of a committed one, or GONE."""
    name = names[node_id & (RING - 1)]
    if name.id != node_id:
        return GONE
    # What is dead, or has another id by now, is found no more.
    return name.at if name.at < 0 or (name.at < count and nodes[name.at].id == node_id) else GONE


@kernel
def remember(names: Any, node_id: int, at: int) -> None:
    """Lets an id be found, at a slot or at ~position."""
    name = names[node_id & (RING - 1)]
    name.id = node_id
    name.at = at


@kernel
def child_of(nodes: Any, count: int, parent: int, token: int) -> int:
    """Slot of a token below a slot, or NONE."""
    for slot in range(parent + 1, count):
        if nodes[slot].parent == parent and nodes[slot].token == token:
            return slot
    return NONE


@kernel
def has_child(nodes: Any, count: int, parent: int) -> bool:
    """Whether anything hangs below a slot."""
    for slot in range(parent + 1, count):
        if nodes[slot].parent == parent:
            return True
    return False


@kernel
def add_one(
    tree: Any, nodes: Any, judge: Any, calibrations: Any, parent: int, token: int, confidence: float, source: int
) -> int:
    """Adds a guess below a slot; where it is there already, the surer source counts.

    Returns:
        Its slot; FULL: there is no place.
    """
    weight = math.log(max(probability(judge, calibrations, confidence), LEAST_CONFIDENCE))
    if parent > ROOT:
        weight += nodes[parent].weight
    if parent < ROOT:
        return FULL
    known = child_of(nodes, tree.count, parent, token)
    if known != NONE:
        nodes[known].confidences[source] = confidence
        raise_all(nodes, tree.count, known, weight - nodes[known].weight)
        return known
    slot: int = tree.count
    if slot == len(nodes):
        return FULL
    tree.count += 1
    node = nodes[slot]
    node.id = 0
    node.sent = 0
    node.kv = NONE
    node.token = token
    node.parent = parent
    node.position = tree.committed_len if parent == ROOT else nodes[parent].position + 1
    node.first = source
    node.weight = weight
    node.confidences[:] = -1.0
    node.confidences[source] = confidence
    return slot


@kernel
def raise_all(nodes: Any, count: int, slot: int, rise: float) -> None:
    """Gives a node a higher weight, and all below it with it."""
    if not rise > 0.0 or math.isinf(rise):
        return
    risen = np.zeros(count, np.bool_)
    for each in range(slot, count):
        parent = nodes[each].parent
        if each == slot or (parent != ROOT and risen[parent]):
            risen[each] = True
            nodes[each].weight += rise


@kernel
def add(f: Arrays, row: int, parent: int, token: int, confidence: float, source: int) -> int:
    """A guess of a source in this process; see `add_one`."""
    judge = f.judges[row, source]
    return add_one(f.trees[row], f.nodes[row], judge, f.calibrations, parent, token, confidence, source)


@kernel
def merge(
    f: Arrays,
    source: int,
    rows: Ints,
    bases: Ints,
    ends: Ints,
    ids: Ints,
    parent_ids: Ints,
    tokens: Ints,
    confidences: Floats,
    counts: Ints,
    firsts: Floats,
) -> None:
    """Adds the guesses of messages, of each up to `ends`.

    A session's guesses beyond as many as there are slots are not looked at until the next commit: each costs a walk
    over the tree, so a drafter that never stops would hold up the steps of all.

    Fills for each message `counts` [messages, 3], how many were added, late and stale, and `firsts`: the best survival
    of a first guess, if it knows the last commit, else -1. A message whose row is NONE is passed over.
    """
    start = 0
    for message in range(len(rows)):
        row = rows[message]
        if row == NONE:
            counts[message, :], firsts[message], start = 0, -1.0, ends[message]
            continue
        tree, nodes, names, judge = f.trees[row], f.nodes[row], f.names[row], f.judges[row, source]
        counts[message, :] = 0
        count = min(ends[message] - start, len(nodes) - tree.offered)
        tree.offered += count
        counts[message, 2] += ends[message] - start - count
        for guess in range(start, start + count):
            node_id, token = ids[guess], tokens[guess]
            if find(names, nodes, tree.count, node_id) != GONE:
                continue
            parent, position = ROOT, bases[message]
            if parent_ids[guess]:
                at = find(names, nodes, tree.count, parent_ids[guess])
                if at == GONE:
                    counts[message, 2] += 1
                    continue
                parent = at if at >= 0 else ROOT
                position = ~at + 1 if at < 0 else nodes[at].position + 1
            if parent == ROOT and position != tree.committed_len:
                if position >= tree.committed_len - RECENT and f.recent[row, position % RECENT] == token:
                    # It came late but was right: its children may still be of use.
                    remember(names, node_id, ~position)
                else:
                    counts[message, 1] += 1
                continue
            if tree.chain and has_child(nodes, tree.count, parent) and child_of(nodes, tree.count, parent, token) < 0:
                counts[message, 2] += 1
                continue
            before = tree.count
            slot = add_one(tree, nodes, judge, f.calibrations, parent, token, confidences[guess], source)
            if slot == FULL:
                counts[message, 2] += 1
                continue
            counts[message, 0] += slot == before
            # A drafter that has forgotten its tree names the same guesses anew.
            nodes[slot].id = node_id
            remember(names, node_id, slot)
        start = ends[message]
        firsts[message] = first_survival(tree, nodes) if bases[message] == tree.committed_len else -1.0


@kernel
def first_survival(tree: Any, nodes: Any) -> float:
    """Best survival of a guess below the root; 0: there is none."""
    best = 0.0
    for slot in range(tree.count):
        if nodes[slot].parent == ROOT:
            best = max(best, math.exp(nodes[slot].weight))
    return best


@kernel
def insert(slots: Ints, weights: Floats, found: int, cap: int, slot: int, weight: float) -> int:
    """Keeps the best `cap` so far in order, of equals the first; returns how many there are."""
    if found == cap:
        if weight <= weights[cap - 1]:
            return found
        found -= 1
    place = found
    while place > 0 and weights[place - 1] < weight:
        slots[place], weights[place] = slots[place - 1], weights[place - 1]
        place -= 1
    slots[place], weights[place] = slot, weight
    return found + 1


@kernel
def best_chain(nodes: Any, count: int, cap: int, least: float, slots: Ints, weights: Floats) -> int:
    """The chain that follows the child of highest survival from the root on; returns its length."""
    found, node = 0, ROOT
    while found < cap:
        best = NONE
        for slot in range(node + 1, count):
            if nodes[slot].parent == node and (best == NONE or nodes[slot].weight > nodes[best].weight):
                best = slot
        if best == NONE or not nodes[best].weight >= least:
            break
        slots[found], weights[found] = best, nodes[best].weight
        found += 1
        node = best
    return found


@kernel
def pick(f: Arrays, rows: Ints, caps: Ints, chains: Bools, least: float, slots: Ints, survivals: Floats) -> None:
    for index in range(len(rows)):
        row, cap, found = rows[index], caps[index], 0
        if cap and chains[index]:
            found = best_chain(f.nodes[row], f.trees[row].count, cap, least, slots[index], survivals[index])
        elif cap:
            for slot in range(f.trees[row].count):
                weight = f.nodes[row, slot].weight
                if weight >= least:
                    found = insert(slots[index], survivals[index], found, cap, slot, weight)
        for rank in range(slots.shape[1]):
            if rank < found:
                survivals[index, rank] = math.exp(survivals[index, rank])
            else:
                slots[index, rank], survivals[index, rank] = NONE, 0.0


@kernel
def gather(
    f: Arrays, rows: Ints, slots: Ints, counts: Ints, taken: Ints, tokens: Ints, positions: Ints, parents: Ints
) -> None:
    total = 0
    for index in range(len(rows)):
        nodes = f.nodes[rows[index]]
        rank_of = np.full(f.trees[rows[index]].count, NONE, np.int32)
        for rank in range(counts[index]):
            slot = slots[index, rank]
            rank_of[slot] = rank
            taken[total], tokens[total], positions[total] = slot, nodes[slot].token, nodes[slot].position
            parents[total] = ROOT if nodes[slot].parent == ROOT else rank_of[nodes[slot].parent]
            total += 1


@kernel
def promise(
    f: Arrays,
    rows: Ints,
    caps: Ints,
    prices: Floats,
    child_shares: Floats,
    slots: Ints,
    survivals: Floats,
    expected: Floats,
    gains: Floats,
) -> None:
    for index in range(len(rows)):
        row, cap, found, total, leaf = rows[index], caps[index], 0, 0.0, 0.0
        nodes, count = f.nodes[row], f.trees[row].count
        if not has_child(nodes, count, ROOT):
            leaf = 1.0
        while found < slots.shape[1] and slots[index, found] != NONE:
            survival = survivals[index, found]
            total += survival
            if survival > leaf and not has_child(nodes, count, slots[index, found]):
                leaf = survival
            found += 1
        # One level, even if a message brings more: with all of them, steps waited too long where rows cost time.
        child = child_shares[index] * leaf
        replaced = survivals[index, cap - 1] if cap and found >= cap else 0.0
        expected[index] = 1.0 + total
        gains[index] = max(0.0, child - replaced) if cap and child > prices[index] else 0.0


@kernel
def paths(f: Arrays, rows: Ints, slots: Ints, ends: Ints, tokens: Ints, kvs: Ints) -> int:
    """Paths from below the root down to some slots, these included.

    Args:
        rows: Of the nodes.
        slots: Of the nodes.
        ends: Filled with where each one's path ends.
        tokens: Of the paths, filled as far as there is room.
        kvs: Where their rows of KV are, filled as far as there is room.

    Returns:
        How much room it takes.
    """
    total = 0
    for index in range(len(rows)):
        nodes, slot, length = f.nodes[rows[index]], slots[index], 0
        while slot != ROOT:
            length += 1
            slot = nodes[slot].parent
        total += length
        ends[index] = total
        slot, place = slots[index], total
        while slot != ROOT:
            place -= 1
            if place < len(tokens):
                tokens[place], kvs[place] = nodes[slot].token, nodes[slot].kv
            slot = nodes[slot].parent
    return total


# Of a node that was matched: it lives on as a committed token.
MATCHED = -2


@kernel
def judge(nodes: Any, count: int, judges: Any, calibrations: Any, parent: int, token: int, chance: float) -> int:
    """Scores all guesses below a slot by the token committed there; `chance` below 0: it matched or did not.

    Returns:
        Slot of the token, or NONE.
    """
    found = NONE
    for slot in range(parent + 1, count):
        node = nodes[slot]
        if node.parent != parent:
            continue
        if node.token == token:
            found = slot
        if node.weight == -np.inf:
            continue
        matched = (1.0 if node.token == token else 0.0) if chance < 0.0 else chance
        for source in range(len(node.confidences)):
            if node.confidences[source] >= 0.0:
                observe(judges[source], calibrations, node.confidences[source], matched)
    return found


@kernel
def compact(
    tree: Any, nodes: Any, names: Any, root: int, hit: bool, at: Ints, freed: Ints, num_freed: int, counts: Any
) -> int:
    """Moves what hangs below the new root to the front, with survivals from there; the others free their KV.

    Args:
        root: Slot of the last committed token.
        hit: Whether that is the new root; if not, nothing lives on.
        at: MATCHED for committed slots, else NONE; filled with where nodes are now.
        freed: Rows of KV that are free now.
        num_freed: How many there are already.
        counts: Those of the session, see `Committed`.

    Returns:
        How many there are then.
    """
    count, above = tree.count, 0.0
    if hit and root != ROOT:
        above = nodes[root].weight
        # What hangs below a masked guess was not counted in; it is guessed anew.
        hit = above > -np.inf
    tree.count = tree.named = tree.unsent = tree.offered = 0
    for slot in range(count):
        each = nodes[slot]
        lives = hit and (each.parent == root or (each.parent != ROOT and at[each.parent] >= 0))
        if each.kv != NONE and not (lives and tree.keeps_kv) and at[slot] != MATCHED:
            freed[num_freed] = each.kv
            num_freed += 1
        if not lives:
            if each.kv != NONE:
                counts[0, each.first] += 1
                counts[1, each.first] += at[slot] == MATCHED
            elif each.weight > -np.inf:
                counts[2, each.first] += 1
            continue
        place = tree.count
        at[slot] = place
        if place != slot:
            nodes[place] = each
        moved = nodes[place]
        moved.parent = ROOT if moved.parent == root else at[moved.parent]
        moved.weight -= above
        if not tree.keeps_kv:
            moved.kv = NONE
        if moved.id:
            remember(names, moved.id, place)
            tree.named += 1
            tree.unsent += moved.sent == 0
        tree.count += 1
    return num_freed


@kernel
def commit(
    f: Arrays,
    rows: Ints,
    ends: Ints,
    tokens: Ints,
    chances: Floats,
    accepted: Ints,
    hits: Bools,
    moves: Ints,
    freed: Ints,
    counts: Any,
) -> tuple[int, int]:
    num_moves = num_freed = start = 0
    for index in range(len(rows)):
        row, end = rows[index], ends[index]
        tree, nodes, names = f.trees[row], f.nodes[row], f.names[row]
        at = np.full(tree.count, NONE, np.int32)
        node, base = ROOT, tree.committed_len
        matched = accepted[index] = 0
        for place in range(start, end):
            chance = chances[place] if len(chances) else -1.0
            child = judge(nodes, tree.count, f.judges[row], f.calibrations, node, tokens[place], chance)
            node = child
            if child == NONE:
                break
            at[child] = MATCHED
            matched += 1
            found = nodes[child]
            if found.id:
                remember(names, found.id, ~found.position)
            if found.kv != NONE:
                accepted[index] += 1
                moves[num_moves, 0], moves[num_moves, 1] = found.kv, found.position
                num_moves += 1
        hits[index] = matched == end - start
        for place in range(start, end):
            f.recent[row, (base + place - start) % RECENT] = tokens[place]
        tree.committed_len = base + end - start
        num_freed = compact(tree, nodes, names, node, hits[index], at, freed, num_freed, counts[index])
        start = end
    return num_moves, num_freed
