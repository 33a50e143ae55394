"""Follows committed tokens: what they judge, what lives on, and whose KV is kept or freed."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.forest.calibrating import observe
from paceline.forest.growing import remember
from paceline.forest.kernel import kernel
from paceline.forest.records import NONE, RECENT, ROOT, Arrays, Bools, Floats, Ints

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
        counts: See `Forest.commit`.

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
        num_freed = compact(tree, nodes, names, node, hits[index], at, freed, num_freed, counts)
        start = end
    return num_moves, num_freed
