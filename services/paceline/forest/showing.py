"""Trees as people read them."""

from __future__ import annotations

import math

from paceline.forest.forest import Forest
from paceline.forest.records import NONE, ROOT


def path(forest: Forest, row: int, slot: int) -> list[int]:
    """Tokens from below the root down to a slot."""
    tokens: list[int] = []
    nodes = forest.arrays.nodes
    while slot != ROOT:
        tokens.append(int(nodes["token"][row, slot]))
        slot = int(nodes["parent"][row, slot])
    return tokens[::-1]


def show(forest: Forest, row: int) -> str:
    """A tree as text, for failing tests and logs: of each node token, survival, id, slot, KV, and who guessed it."""
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
