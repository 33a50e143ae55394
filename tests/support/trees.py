"""Trees in a forest, as tests look at them: nodes as objects, read at one moment."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.core.acceptance import SparseDraft
from paceline.core.draft_policy import Goodput
from paceline.core.link import merge
from paceline.core.params import DRAFT_MODEL, METHODS
from paceline.core.target_events import StepReport
from paceline.core.tree import DraftTree
from paceline.forest import NONE, ROOT, Forest, Picked, rows_of
from tests.support.guesses import NodeGuess, SessionDrafts, to_drafts


@dataclass(eq=False)
class Seen:
    """One node, or the root."""

    slot: int
    token_id: int
    position: int
    parent: Seen | None
    guesses: dict[str, float]
    survival: float
    draft: SparseDraft | None = None
    children: dict[int, Seen] = field(default_factory=dict)

    def below(self) -> list[Seen]:
        """All nodes below it, by depth."""
        nodes = list(self.children.values())
        for node in nodes:
            nodes += node.children.values()
        return nodes

    def path(self) -> list[int]:
        """Tokens from below the root down to it."""
        return [] if self.parent is None else [*self.parent.path(), self.token_id]


def seen(tree: DraftTree) -> Seen:
    """The root of a tree."""
    forest = tree.forest
    committed_len = int(forest.arrays.trees["committed_len"][tree.row])
    nodes = {ROOT: Seen(ROOT, -1, committed_len - 1, None, {}, 1.0)}
    for slot, node in enumerate(forest.arrays.nodes[tree.row, : tree.num_nodes]):
        parent = nodes[int(node["parent"])]
        sure = zip(forest.sources, node["confidences"].tolist(), strict=True)
        nodes[slot] = parent.children[int(node["token"])] = Seen(
            slot,
            int(node["token"]),
            int(node["position"]),
            parent,
            {source: each for source, each in sure if each >= 0.0},
            math.exp(node["weight"]),
            tree.drafts.get(int(node["position"])),
        )
    return nodes[ROOT]


def show(forest: Forest, row: int) -> str:
    """A tree as text, for failing tests: of each node token, survival, id, slot, KV, and who guessed it."""
    tree, nodes = forest.arrays.trees[row], forest.arrays.nodes[row]
    lines = [f"row {row}: {tree['count']} nodes beyond {tree['committed_len']} tokens"]

    def below(parent: int, indent: str) -> None:
        for slot in range(int(tree["count"])):
            node = nodes[slot]
            if node["parent"] != parent:
                continue
            kv = "" if node["kv"] == NONE else f" kv {node['kv']}"
            by = ", ".join(
                f"{source} {sure:.3f}"
                for source, sure in zip(forest.sources, node["confidences"], strict=True)
                if sure >= 0.0
            )
            survival = math.exp(node["weight"])
            lines.append(f"{indent}{node['token']}: {survival:.3f} #{node['id']} @{slot}{kv} ({by})")
            below(slot, indent + "  ")

    below(ROOT, "  ")
    return "\n".join(lines)


def nodes_of(tree: DraftTree) -> list[Seen]:
    """All nodes of a tree, by depth."""
    return seen(tree).below()


def new_tree(committed: int | Sequence[int], **options: Any) -> DraftTree:
    """A tree in a forest of its own, beyond so many tokens."""
    return DraftTree(Forest(METHODS), range(committed) if isinstance(committed, int) else committed, **options)


def merge_into(tree: DraftTree, guesses: Sequence[NodeGuess], base_len: int, source: str = DRAFT_MODEL) -> list[int]:
    """A drafter's guesses come; how many were added, late and stale."""
    drafts = to_drafts(SessionDrafts(1, base_len, guesses))
    merged = merge(tree.forest, source, rows_of([tree.row]), drafts, {0: tree} if tree.filters_guesses else None)
    return merged.counts[0].tolist()


def advance(tree: DraftTree, *tokens: int) -> bool:
    """Tokens are committed; whether the tree held them all."""
    return bool(tree.forest.commit(rows_of([tree.row]), rows_of([len(tokens)]), rows_of(tokens)).hits[0])


def walk(tokens: Sequence[int], parents: Sequence[int], choose: Callable[[list[int]], int]) -> list[int]:
    """Follows tokens down guesses, in columns as a step verifies them, until one that was not guessed.

    Args:
        choose: From the tokens so far to the next one.
    """
    path: list[int] = []
    at: int | None = ROOT
    guesses = {guess: place for place, guess in enumerate(zip(parents, tokens, strict=True))}
    while at is not None:
        path.append(choose(path))
        at = guesses.get((at, path[-1]))
    return path


def allot(
    policy: Goodput, trees: Sequence[DraftTree], caps: Iterable[int], *, chain: bool = False, **options: Any
) -> list[list[int]]:
    """The slots that a policy picks of each tree, so many at most; trees may be in different forests."""
    caps = [min(cap, policy.max_nodes) for cap in caps]
    chains = np.array([chain])
    found = [
        tree.forest.best(rows_of([tree.row]), rows_of([cap]), chains) for tree, cap in zip(trees, caps, strict=True)
    ]
    most = max(caps, default=0)
    slots, survivals = np.full((len(found), most), -1, np.int32), np.zeros((len(found), most))
    for index, each in enumerate(found):
        slots[index, : caps[index]], survivals[index, : caps[index]] = each.slots[0], each.survivals[0]
    options.setdefault("weights", np.ones(len(found)))
    counts = policy.allocate(Picked(slots, survivals), **options).tolist()
    return [row[:count] for row, count in zip(slots.tolist(), counts, strict=True)]


def nodes(report: StepReport, *fates: str) -> Counter[str]:
    """Nodes of some fates that a step has counted, by source."""
    found: Counter[str] = Counter()
    for (metric, *labels), count in report.counts.items():
        if metric == "paceline:draft_nodes" and labels[1] in fates:
            found[labels[0]] += int(count)
    return found


def turns(report: StepReport) -> Counter[str]:
    """Sessions for which sources were asked, by source."""
    return Counter(
        {labels[0]: int(count) for (name, *labels), count in report.counts.items() if name == "paceline:source_turns"}
    )
