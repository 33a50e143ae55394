"""A session's tree in a verifier's forest as sources see it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from paceline.core.acceptance import SparseDraft
from paceline.core.messages import Drafts
from paceline.core.params import MAX_DRAFT_TOKENS
from paceline.forest import NONE, ROOT, Forest, Picked, rows_of

# Tokens of paths about which a session's grammar is asked in a step at most: those of a chain as deep as a step can
# verify. A drafter that sent chains of a thousand guesses held up all sessions for a second a step.
MOST_ASKED = MAX_DRAFT_TOKENS * (MAX_DRAFT_TOKENS + 1) // 2


class DraftTree:
    """A row of a forest; nodes are slots, which are good until the next commit.

    Args:
        tokens: Committed ones, at least 1.
        calibrations: Numbers of those of its sources; a source without one is believed.
        chain: A node has one child: what is guessed beside the first is dropped, whatever it is.
        can_follow: Whether tokens may follow those committed at all; None: any may. Guesses that may not are masked.

    Attributes:
        root: Stands for the last committed token.
        row: In the forest.
        drafts: Distributions that the guesses of a chain were sampled from, by position.
        filters_guesses: Whether `filter_guesses` has anything to do.
    """

    root = ROOT

    def __init__(
        self,
        forest: Forest,
        tokens: Sequence[int],
        calibrations: Mapping[str, int] | None = None,
        *,
        chain: bool = False,
        can_follow: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        self.forest = forest
        self.row = forest.take_row()
        # Its row goes back when the session ends, or was never made for want of something else.
        self._give_back = weakref.finalize(self, forest.give_back, self.row)
        self._give_back.atexit = False
        self.chain = chain
        self.can_follow = can_follow
        self.filters_guesses = chain or can_follow is not None
        self._num_asked = 0
        self.drafts: dict[int, SparseDraft] = {}
        self._calibrations: Mapping[str, int] | None = None
        self.open(tokens, calibrations or {})

    def open(self, tokens: Sequence[int], calibrations: Mapping[str, int]) -> None:
        """It begins anew, as ids do; calibrations that are other ones begin with this session."""
        self.forest.open(self.row, tokens, chain=self.chain)
        self.drafts = {}
        self._num_asked = 0
        if calibrations is not self._calibrations:
            self._calibrations = calibrations
            for number, source in enumerate(self.forest.sources):
                self.forest.judge(self.row, number, calibrations.get(source, NONE))

    def close(self) -> None:
        self._give_back()

    @property
    def num_nodes(self) -> int:
        """All nodes, masked ones included."""
        return self.forest.count(self.row)

    def path(self, node: int) -> list[int]:
        """Tokens from below the root down to a node."""
        return self.forest.path(self.row, node)

    def permits(self, parent: int, token_id: int) -> bool:
        """Whether a guess may be right at all; after `MOST_ASKED` none is taken for it until the next commit."""
        if self.can_follow is None:
            return True
        if self._num_asked >= MOST_ASKED:
            return False
        path = [*self.path(parent), token_id]
        self._num_asked += len(path)
        return self.can_follow(path)

    def probability(self, source: str, confidence: float) -> float:
        """Probability that a source's guess matches if its parent does."""
        return self.forest.probability(self.row, self.forest.number_of[source], confidence)

    def suggest(self, parent: int, token_id: int, confidence: float, source: str) -> int:
        """Adds a guess of a source in this process; where another source guessed the same, the surer one counts."""
        return self.forest.add(self.row, parent, token_id, confidence, self.forest.number_of[source])

    def best(self, limit: int) -> Picked:
        """The best nodes of it alone; see `Forest.best`."""
        return self.forest.best(rows_of([self.row]), rows_of([limit]))

    def leaves(self, limit: int) -> list[int]:
        """Returns the childless nodes among the best `limit`, best first."""
        slots = self.best(limit).slots[0]
        return [slot for slot in slots[slots != NONE].tolist() if not self.forest.has_child(self.row, slot)]

    def follow_commit(self, committed_len: int) -> None:
        """Drops distributions of positions that are committed; the grammar may be asked again."""
        self._num_asked = 0
        if self.drafts:
            self.drafts = {position: draft for position, draft in self.drafts.items() if position >= committed_len}

    def filter_guesses(self, first: int, drafts: Drafts, mine: slice) -> int:
        """Looks at the nodes from a slot on.

        Args:
            drafts: The guesses that have added them, beside those for others.
            mine: Which of the guesses are for this session.

        Returns:
            How many of the nodes it has masked, since the grammar forbids them or was asked often enough.
        """
        distributions: dict[tuple[int, int], SparseDraft] = {}
        if self.chain:
            # A hostile drafter may use an id twice: the first counts, as in the tree, and only for its own token.
            ids, tokens = drafts.ids[mine].tolist(), drafts.tokens[mine].tolist()
            for *name, distribution in zip(ids, tokens, drafts.distributions[mine], strict=True):
                distributions.setdefault((name[0], name[1]), distribution)
        nodes, num_masked = self.forest.arrays.nodes[self.row], 0
        for slot in range(first, self.num_nodes):
            node = nodes[slot]
            if self.chain:
                drawn_from = distributions.get((int(node["id"]), int(node["token"])))
                if drawn_from is not None:
                    self.drafts[int(node["position"])] = drawn_from
            elif np.isinf(node["weight"]) or not self.permits(int(node["parent"]), int(node["token"])):
                self.forest.mask(self.row, slot)
                num_masked += 1
        return num_masked
