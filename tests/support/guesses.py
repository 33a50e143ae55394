"""Drafts and commits as tests write and read them: session by session, and node by node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from paceline.core.acceptance import SparseDraft
from paceline.core.messages import Commit, Commits, Drafts, ToDrafter


class NodeGuess(NamedTuple):
    """One new node of a draft tree; see `Drafts`."""

    node_id: int
    parent_id: int
    token_id: int
    confidence: float
    distribution: SparseDraft | None = None


class SessionDrafts(NamedTuple):
    """New nodes of one session's tree, parents before children."""

    number: int
    base_len: int
    nodes: Sequence[NodeGuess]


def to_drafts(*sessions: SessionDrafts) -> Drafts:
    """Those of some sessions; all nodes have a distribution, or none has."""
    nodes = [node for each in sessions for node in each.nodes]
    ids, parent_ids, tokens = np.array([node[:3] for node in nodes], np.int64).reshape(-1, 3).astype(np.int32).T
    return Drafts(
        numbers=np.array([each.number for each in sessions], np.int64).astype(np.int32),
        base_lens=np.array([each.base_len for each in sessions], np.int64).astype(np.int32),
        ends=np.cumsum([len(each.nodes) for each in sessions], dtype=np.int32),
        ids=ids.copy(),
        parent_ids=parent_ids.copy(),
        tokens=tokens.copy(),
        confidences=np.array([node.confidence for node in nodes], np.float64),
        distributions=[node.distribution for node in nodes if node.distribution is not None],
    )


def by_session(drafts: Drafts) -> Iterator[SessionDrafts]:
    """Those of each session, in order."""
    columns = (drafts.ids, drafts.parent_ids, drafts.tokens, drafts.confidences)
    distributions: Sequence[SparseDraft | None] = drafts.distributions or [None] * drafts.num_nodes
    nodes = [*map(NodeGuess, *(column.tolist() for column in columns), distributions)]
    start = 0
    for number, base_len, end in zip(
        *(column.tolist() for column in (drafts.numbers, drafts.base_lens, drafts.ends)), strict=True
    ):
        yield SessionDrafts(number, base_len, nodes[start:end])
        start = end


def each_commit(messages: Iterable[ToDrafter]) -> Iterator[ToDrafter | Commit]:
    """What a verifier says, with the commits of every session by themselves."""
    for message in messages:
        yield from message if isinstance(message, Commits) else [message]


def to_commits(*sessions: Commit) -> Commits:
    """Those of some sessions."""
    numbers, base_lens, rooms = (
        np.array(column, np.int64).astype(np.int32)
        for column in zip(*((each.number, each.base_len, each.room) for each in sessions), strict=True)
    )
    return Commits(
        numbers=numbers,
        base_lens=base_lens,
        ends=np.cumsum([len(each.token_ids) for each in sessions], dtype=np.int32),
        tokens=np.array([token for each in sessions for token in each.token_ids], np.int64).astype(np.int32),
        prices=np.array([each.price for each in sessions], np.float64),
        rooms=rooms,
    )
