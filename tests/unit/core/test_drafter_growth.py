"""Where a drafter grows next, what it keeps back, and when it tells."""

from __future__ import annotations

from paceline.core.drafter_growth import AHEAD, DrafterGrowth, Guesses
from paceline.core.messages import Commit, OpenSession
from paceline.core.params import SamplingParams
from paceline.core.session import DrafterSession

CONTEXT_LEN = 1000


def opened(price: float = 0.5, room: int = 100) -> tuple[DrafterSession, DrafterGrowth, set[int]]:
    mirror = DrafterSession(
        OpenSession(
            session_id="s",
            epoch=1,
            token_ids=(5, 6),
            prompt_len=2,
            sampling=SamplingParams(max_tokens=50),
            price=price,
            room=room,
        )
    )
    expanded: set[int] = set()
    return mirror, DrafterGrowth(mirror, expanded), expanded


def commit(mirror: DrafterSession, growth: DrafterGrowth, token_id: int, price: float = 0.5) -> None:
    mirror.receive(
        Commit(session_id="s", epoch=1, base_len=len(mirror.tokens), token_ids=(token_id,), price=price, room=100)
    )
    growth.committed()
    growth.release()


def live(mirror: DrafterSession) -> set[int]:
    return {node.token_id for node in mirror.tree.nodes()}


def test_guesses_worth_less_than_the_price_asks_are_kept_back_until_a_commit_raises_them() -> None:
    mirror, growth, expanded = opened()
    growth.offer(mirror.tree.root, Guesses(ranked=[(1, 0.2)]))
    child = mirror.tree.root.children[1]
    expanded.add(child.node_id)
    # 0.2 x 0.2 is below 0.1 x 0.5 while the child is a guess, and 0.2 is above it once it is committed.
    growth.offer(child, Guesses(ranked=[(2, 0.3), (3, 0.2)]))
    assert live(mirror) == {1, 2}
    commit(mirror, growth, 1)
    assert live(mirror) == {2, 3}


def test_only_the_children_of_expanded_nodes_are_grown_best_first() -> None:
    mirror, growth, expanded = opened()
    growth.offer(mirror.tree.root, Guesses(ranked=[(1, 0.3), (2, 0.6)]))
    assert [node.token_id for node in growth.frontier(5, CONTEXT_LEN)] == [2, 1]
    best = mirror.tree.root.children[2]
    expanded.add(best.node_id)
    growth.offer(best, Guesses(ranked=[(3, 0.9)]))
    assert [node.token_id for node in growth.frontier(5, CONTEXT_LEN)] == [3, 1]
    assert [node.token_id for node in growth.frontier(1, CONTEXT_LEN)] == [3]
    # Children of the node at position 3 would be the fifth token.
    assert [node.token_id for node in growth.frontier(5, 4)] == [1]


def test_a_rise_in_price_narrows_what_is_grown_and_at_1_nothing_is() -> None:
    mirror, growth, _ = opened(price=0.5)
    growth.offer(mirror.tree.root, Guesses(ranked=[(1, 0.5), (2, AHEAD * 0.6)]))
    assert len(growth.frontier(5, CONTEXT_LEN)) == 2
    mirror.price = 0.9
    assert [node.token_id for node in growth.frontier(5, CONTEXT_LEN)] == [1]
    mirror.price = 1.0
    assert growth.frontier(5, CONTEXT_LEN) == []


def test_a_full_tree_is_not_grown() -> None:
    mirror, growth, _ = opened(room=2)
    growth.offer(mirror.tree.root, Guesses(ranked=[(1, 0.5), (2, 0.3)]))
    assert not growth.wants_nodes
    assert growth.frontier(5, CONTEXT_LEN) == []


def test_the_first_nodes_after_a_commit_go_at_once_and_later_ones_are_held() -> None:
    mirror, growth, expanded = opened(price=0.0)
    node, sent = mirror.tree.root, []
    for token_id in range(1, 9):
        growth.offer(node, Guesses(ranked=[(token_id, 0.9)]))
        node = node.children[token_id]
        expanded.add(node.node_id)
        message = growth.push(lambda: True)
        sent.append(0 if message is None else len(message.nodes))
    assert sent == [1, 1, 0, 2, 0, 0, 3, 0]
    assert growth.push(lambda: False) is not None, "the last for now is not held"
