"""Adds guesses to trees: those of sources in this process by slots, those of messages by ids."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.forest.calibrating import probability
from paceline.forest.kernel import kernel
from paceline.forest.records import FULL, GONE, LEAST_CONFIDENCE, NONE, RECENT, RING, ROOT, Arrays, Floats, Ints


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
    levels: Ints,
) -> None:
    """Adds the guesses of messages, of each up to `ends`.

    A session's guesses beyond as many as there are slots are not looked at until the next commit: each costs a walk
    over the tree, so a drafter that never stops would hold up the steps of all.

    Fills for each message `counts` [messages, 3], how many were added, late and stale; `firsts`: the best survival
    of a first guess, if it knows the last commit, else -1; and `levels`: by how many it has deepened the tree, else 0.
    """
    start = 0
    for message in range(len(rows)):
        row = rows[message]
        tree, nodes, names, judge = f.trees[row], f.nodes[row], f.names[row], f.judges[row, source]
        counts[message, :] = 0
        levels[message], end = 0, end_of(tree, nodes)
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
        firsts[message] = -1.0
        if bases[message] == tree.committed_len:
            firsts[message] = first_survival(tree, nodes)
            levels[message] = end_of(tree, nodes) - end


@kernel
def end_of(tree: Any, nodes: Any) -> int:
    """Position beyond the deepest guess."""
    end: int = tree.committed_len
    for slot in range(tree.count):
        end = max(end, nodes[slot].position + 1)
    return end


@kernel
def first_survival(tree: Any, nodes: Any) -> float:
    """Best survival of a guess below the root; 0: there is none."""
    best = 0.0
    for slot in range(tree.count):
        if nodes[slot].parent == ROOT:
            best = max(best, math.exp(nodes[slot].weight))
    return best
