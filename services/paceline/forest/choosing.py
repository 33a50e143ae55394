"""Picks nodes by their survival, and looks at what trees promise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paceline.forest.growing import has_child
from paceline.forest.kernel import kernel
from paceline.forest.records import NONE, ROOT, Arrays, Bools, Floats, Ints


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
    levels: Floats,
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
        expected[index], gains[index] = 1.0 + total, 0.0
        # Each level below the leaf, as far as there is room, or in the place of the weakest guess.
        level, child = 0, leaf
        while level < min(levels[index] - 0.5, cap):
            level += 1
            child *= child_shares[index]
            replaced = survivals[index, cap - level] if cap - level < found else 0.0
            if child <= max(prices[index], replaced):
                break
            gains[index] += child - replaced


@kernel
def trace(f: Arrays, rows: Ints, slots: Ints, ends: Ints, tokens: Ints, kvs: Ints) -> int:
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
