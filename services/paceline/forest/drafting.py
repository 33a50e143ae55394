"""A drafter's end: where trees grow next, what is kept back, and when nodes are pushed.

The price is for verifying a node now. Growing below it still pays while the drafter has time: what is not worth
verifying in this round is at hand in the next one, if the commit leads there. Guesses that are worth less than that
are in the tree without an id until a commit comes closer to them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.forest.choosing import insert
from paceline.forest.growing import add_one, has_child
from paceline.forest.kernel import kernel
from paceline.forest.records import FULL, NONE, ROOT, Arrays, Floats, Ints

# Share of the price from which on a node is worth growing.
AHEAD = 0.1
# Every message costs the verifier time in the middle of a step, so nodes are held back for this number of draft
# steps; not those of the first two after a commit, which a verifier may be waiting for.
MOST_HELD = 3
# More nodes ahead than any verifier uses; a peer that asks for more does not get it.
MAX_ROOM = 256


@kernel
def least_weight(tree: Any) -> float:
    """Logarithm of the least survival worth growing."""
    least = AHEAD * tree.price
    return math.log(least) if least > 0.0 else -math.inf


@kernel
def wants_nodes(tree: Any) -> bool:
    """Whether the verifier would take more nodes."""
    return bool(tree.price < 1.0 and tree.named < tree.room)


@kernel
def name_worthy(tree: Any, nodes: Any) -> None:
    """Names the nodes that are worth it by now, so that they are pushed."""
    least = least_weight(tree)
    for slot in range(tree.count):
        node = nodes[slot]
        if not node.id and node.weight >= least:
            node.id = tree.next_id
            tree.next_id += 1
            tree.named += 1
            tree.unsent += 1


@kernel
def grow(f: Arrays, rows: Ints, parents: Ints, tokens: Ints, confidences: Floats) -> None:
    """Hangs guesses below computed nodes, `[nodes, width]`, best first, tokens below 0: none; names what is worth it.

    Below a node of a chain that has a child nothing is added: its guess is drawn only once.
    """
    for index in range(len(rows)):
        row, parent = rows[index], parents[index]
        tree, nodes, judge = f.trees[row], f.nodes[row], f.judges[row, 0]
        if not (tree.chain and has_child(nodes, tree.count, parent)):
            for rank in range(tokens.shape[1]):
                token, confidence = tokens[index, rank], confidences[index, rank]
                if token < 0 or add_one(tree, nodes, judge, f.calibrations, parent, token, confidence, 0) == FULL:
                    break
        name_worthy(tree, nodes)


@kernel
def reprice(f: Arrays, rows: Ints, prices: Floats, rooms: Ints) -> None:
    """After a commit: messages go out soon again, and nodes that have become worth it are named."""
    for index in range(len(rows)):
        tree = f.trees[rows[index]]
        tree.price, tree.room, tree.held, tree.push_at = prices[index], rooms[index], 0, 1
        if tree.price < 1.0:
            name_worthy(tree, f.nodes[rows[index]])


@kernel
def grows(nodes: Any, slot: int, least: float, context_len: int) -> bool:
    """Whether a node is worth computing: named, not computed, below a computed one, with children in the context."""
    node = nodes[slot]
    return bool(
        node.id > 0
        and node.kv == NONE
        and node.weight >= least
        and (node.parent == ROOT or nodes[node.parent].kv != NONE)
        and node.position + 1 < context_len
    )


@kernel
def can_grow(tree: Any, nodes: Any, context_len: int) -> bool:
    """Whether a tree has a node worth computing."""
    if not tree.ready or not wants_nodes(tree):
        return False
    least = least_weight(tree)
    for slot in range(tree.count):
        if grows(nodes, slot, least, context_len):
            return True
    return False


@kernel
def any_work(f: Arrays, rows: Ints, room: bool, context_len: int) -> bool:
    """Whether a session lags, or its tree has something to push or, if there is room for KV, to grow."""
    for index in range(len(rows)):
        tree = f.trees[rows[index]]
        if tree.lags or tree.unsent or (room and can_grow(tree, f.nodes[rows[index]], context_len)):
            return True
    return False


@kernel
def frontier(
    f: Arrays, rows: Ints, limit: int, context_len: int, out_rows: Ints, out_slots: Ints, out_weights: Floats
) -> int:
    total = 0
    slots, weights = np.empty(limit, np.int32), np.empty(limit)
    for index in range(len(rows)):
        row = rows[index]
        tree, nodes = f.trees[row], f.nodes[row]
        if not tree.ready or not wants_nodes(tree):
            continue
        least, found = least_weight(tree), 0
        for slot in range(tree.count):
            if grows(nodes, slot, least, context_len):
                found = insert(slots, weights, found, limit, slot, nodes[slot].weight)
        for rank in range(found):
            out_rows[total], out_slots[total], out_weights[total] = row, slots[rank], weights[rank]
            total += 1
    return total


@kernel
def is_due(tree: Any, goes_on: bool) -> bool:
    """Whether nodes are pushed after a draft step: held long enough, or the tree does not go on now."""
    tree.held += 1
    if tree.held < tree.push_at and goes_on:
        return False
    tree.push_at = tree.held + min(tree.held, MOST_HELD)
    return True


@kernel
def push(
    f: Arrays,
    rows: Ints,
    room: bool,
    at_once: bool,
    context_len: int,
    ids: Ints,
    parent_ids: Ints,
    tokens: Ints,
    positions: Ints,
    confidences: Floats,
    ends: Ints,
) -> None:
    total = 0
    for index in range(len(rows)):
        tree, nodes = f.trees[rows[index]], f.nodes[rows[index]]
        if tree.unsent and (at_once or is_due(tree, tree.lags or (room and can_grow(tree, nodes, context_len)))):
            for slot in range(tree.count):
                node = nodes[slot]
                if node.id and not node.sent:
                    node.sent = 1
                    ids[total], tokens[total], positions[total] = node.id, node.token, node.position
                    confidences[total] = node.confidences[0]
                    parent_ids[total] = 0 if node.parent == ROOT else nodes[node.parent].id
                    total += 1
            tree.unsent = 0
        ends[index] = total
