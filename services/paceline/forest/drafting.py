"""A drafter's end: where trees grow next, what is kept back, and when nodes are pushed.

The price is for verifying a node now. Growing below it still pays while the drafter has time: what is not worth
verifying in this round is at hand in the next one, if the commit leads there. Guesses that are worth less than that
are in the tree without an id until a commit comes closer to them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.forest.records import FULL, NONE, ROOT, Arrays, Floats, Ints, kernel
from paceline.forest.tree_loops import add_one, has_child, insert

# Share of the price from which on a node is worth growing.
AHEAD = 0.1
# Every message costs the verifier time in the middle of a step, so nodes are held back for this number of draft
# steps; not those of the first two after a commit, which a verifier may be waiting for.
MOST_HELD = 3
# More nodes ahead than any verifier uses; a peer that asks for more does not get it.
MAX_ROOM = 256
# Attention on CUDA sees so many nodes of a row's path, the row itself included.
MAX_DEPTH = 64
# Weight of a new observation of how sure the best guess below a node is.
SHARE_WEIGHT = 0.1
# What is drafted ahead takes at most this share of the time between two commits in one call, since a commit that comes
# meanwhile waits for its end.
AHEAD_SHARE = 1 / 16


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
def computed_to(tree: Any, context_len: int) -> int:
    """Position from which on no node is computed: its children must lie in the context, and its path has a bound."""
    return int(min(context_len - 1, tree.committed_len + MAX_DEPTH))


@kernel
def name_worthy(tree: Any, nodes: Any) -> None:
    """Names the nodes that are worth it by now while there is room, so that they are pushed."""
    least = least_weight(tree)
    for slot in range(tree.count):
        if tree.named >= tree.room:
            break
        node = nodes[slot]
        if not node.id and node.weight >= least:
            node.id = tree.next_id
            tree.next_id += 1
            tree.named += 1
            tree.unsent += 1


@kernel
def grow(f: Arrays, rows: Ints, parents: Ints, tokens: Ints, confidences: Floats, kv: Ints) -> None:
    """Hangs guesses below computed nodes, `[levels, nodes, width]`, and names what is worth it; see `Forest.grow`.

    Below a node of a chain that has a child nothing is added: its guess is drawn only once.
    """
    for index in range(len(rows)):
        row, parent = rows[index], parents[index]
        tree, nodes, judge = f.trees[row], f.nodes[row], f.judges[row, 0]
        for level in range(len(tokens)):
            if tokens[level, index, 0] < 0 or (tree.chain and has_child(nodes, tree.count, parent)):
                break
            tree.share += SHARE_WEIGHT * (confidences[level, index, 0] - tree.share)
            best = NONE
            for rank in range(tokens.shape[2]):
                token, confidence = tokens[level, index, rank], confidences[level, index, rank]
                slot = FULL
                if token >= 0:
                    slot = add_one(tree, nodes, judge, f.calibrations, parent, token, confidence, 0)
                if slot == FULL:
                    break
                if rank == 0:
                    best = slot
            name_worthy(tree, nodes)
            # The best one was the row of the next level; below what is kept back nothing is hung.
            if best == NONE or level == len(kv) or tokens[level + 1, index, 0] < 0 or not nodes[best].id:
                break
            if nodes[best].kv == NONE:
                nodes[best].kv, kv[level, index] = kv[level, index], NONE
            parent = best


@kernel
def levels(f: Arrays, rows: Ints, slots: Ints, most: int, costs: Floats, context_len: int, counts: Ints) -> None:
    """How many levels of guesses below nodes one call drafts, each below the best of the level before.

    While a verifier waits, as many as a step of it gains by; what is drafted ahead delays the next commit but little.

    Args:
        rows: int32 `[nodes]`.
        slots: int32 `[nodes]`, or ROOT.
        most: Of levels.
        costs: float64 `[nodes]`, time of a level as a share of that between two commits.
        counts: int32 `[nodes]`, filled, at least 1.
    """
    for index in range(len(rows)):
        tree, nodes, slot = f.trees[rows[index]], f.nodes[rows[index]], slots[index]
        survival, position, expected = 1.0, tree.committed_len - 1, 1.0
        if slot != ROOT:
            survival, position = math.exp(nodes[slot].weight), nodes[slot].position
        least = max(tree.price, 0.0)
        cost = costs[index]
        cap = min(most, computed_to(tree, context_len) - position, tree.room - tree.named)
        if tree.held:
            # Its verifier has what it waited for.
            cap, cost, least = min(cap, int(AHEAD_SHARE / cost)), 0.0, AHEAD * tree.price
        else:
            for each in range(tree.count):
                if nodes[each].id:
                    expected += math.exp(nodes[each].weight)
        count = 0
        while count < cap:
            survival *= tree.share
            if survival < least or survival < expected * cost:
                break
            expected += survival
            count += 1
        counts[index] = max(1, count)


@kernel
def reprice(f: Arrays, rows: Ints, prices: Floats, rooms: Ints) -> None:
    """After a commit: messages go out soon again, and nodes that have become worth it are named."""
    for index in range(len(rows)):
        tree = f.trees[rows[index]]
        tree.price, tree.room, tree.held, tree.push_at = prices[index], rooms[index], 0, 1
        if tree.price < 1.0:
            name_worthy(tree, f.nodes[rows[index]])


@kernel
def grows(nodes: Any, slot: int, least: float, end: int) -> bool:
    """Whether a node is worth computing: named, not computed, below a computed one, before `computed_to`."""
    node = nodes[slot]
    return bool(
        node.id > 0
        and node.kv == NONE
        and node.weight >= least
        and (node.parent == ROOT or nodes[node.parent].kv != NONE)
        and node.position < end
    )


@kernel
def can_grow(tree: Any, nodes: Any, context_len: int) -> bool:
    """Whether a tree has a node worth computing."""
    if not tree.ready or not wants_nodes(tree):
        return False
    least, end = least_weight(tree), computed_to(tree, context_len)
    for slot in range(tree.count):
        if grows(nodes, slot, least, end):
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
        least, end, found = least_weight(tree), computed_to(tree, context_len), 0
        for slot in range(tree.count):
            if grows(nodes, slot, least, end):
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
