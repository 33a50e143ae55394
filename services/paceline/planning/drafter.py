"""A simulated drafter: the tree growth of `core` in shared batches, without a model.

It plans steps as `paceline.drafting.draft_model` does: commits first, then the most promising nodes of all sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.messages import CloseSession, Commit, DraftNodes, OpenSession, ToDrafter
from paceline.core.session import DrafterSession
from paceline.core.tree import Node, NodeState, Pruning
from paceline.core.tree_growth import MAX_ROOM, Guesses, TreeGrowth
from paceline.planning.guesses import RIGHT, STRIDE, GuessSource
from paceline.planning.profile import DrafterFacts

# Sessions of a simulation are as long as its load says; their drafters have context enough.
CONTEXT_LEN = 1 << 19


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expansion:
    session: SimulatedDraft
    node: Node


class SimulatedDraft:
    """One session at its drafter.

    Args:
        opened: What the verifier told of it.
    """

    def __init__(self, opened: OpenSession) -> None:
        self.number = int(opened.session_id)
        self.mirror = DrafterSession(opened)
        self.expanded: set[int] = set()
        self.growth = TreeGrowth(self.mirror, self.expanded)
        self._frontier: list[Node] | None = None
        # Tokens whose KV is computed.
        self.computed = self.computed_to = 0

    @property
    def num_tokens(self) -> int:
        """Committed tokens."""
        return len(self.mirror.tokens)

    @property
    def num_missing(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.mirror.tokens) - self.computed

    def commit(self, message: Commit) -> DraftNodes | None:
        """Applies a commit; returns what it makes worth sending."""
        base_len, self._frontier = len(self.mirror.tokens), None
        pruning = self.mirror.receive(message)
        if not isinstance(pruning, Pruning):
            return None
        self.growth.committed()
        kept = sum(node.node_id in self.expanded for node in pruning.matched)
        if self.computed == base_len:
            self.computed += kept
        self.expanded.intersection_update({node.node_id for node in self.mirror.tree.nodes()})
        self.growth.release()
        return self.mirror.drain() if pruning.hit else None

    def frontier(self) -> list[Node]:
        """All of `TreeGrowth.frontier`, looked up anew when something has changed; none while tokens are missing."""
        if self.num_missing:
            return []
        if self._frontier is None:
            self._frontier = self.growth.frontier(MAX_ROOM, CONTEXT_LEN)
        return self._frontier

    @property
    def wants_step(self) -> bool:
        """Whether a draft step has something to do for it."""
        return self.num_missing > 0 or bool(self.frontier())

    def expand(self, node: Node, guesses: Guesses) -> None:
        """Takes in what a step computed below a node."""
        self._frontier = None
        self.growth.offer(node, guesses)

    def push(self) -> DraftNodes | None:
        """See `TreeGrowth.push`."""
        return self.growth.push(lambda: self.wants_step)


class SimulatedDrafter:
    """Sessions of all verifiers of a cell that this drafter drafts for.

    Args:
        facts: Of the draft model on its device.
        truth: What it guesses.
    """

    def __init__(self, facts: DrafterFacts, truth: GuessSource) -> None:
        self._facts = facts
        self._truth = truth
        self._sessions: dict[str, SimulatedDraft] = {}
        self._said: list[DraftNodes] = []
        self._expansions: list[_Expansion] = []

    @property
    def session_ids(self) -> list[str]:
        """Sessions that it drafts for."""
        return list(self._sessions)

    def handle(self, message: ToDrafter) -> None:
        """Takes in a message about a session."""
        session = self._sessions.get(message.session_id)
        match message:
            case OpenSession():
                self._open(message)
            case Commit() if session is not None:
                released = session.commit(message)
                if released is not None:
                    self._said.append(released)
            case CloseSession():
                self._sessions.pop(message.session_id, None)
            case _:
                pass

    def _open(self, message: OpenSession) -> None:
        """A verifier opened a session; it goes without drafts where there is no room for it."""
        device = self._facts.device
        held = sum(session.num_tokens for session in self._sessions.values())
        if len(self._sessions) < device.max_sessions and held + len(message.token_ids) <= device.kv_tokens:
            self._sessions[message.session_id] = SimulatedDraft(message)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._said) or any(
            session.mirror.has_unsent or session.wants_step for session in self._sessions.values()
        )

    def start_step(self) -> float:
        """Plans a step; returns the seconds it takes."""
        if self._said:
            # What a commit asked for goes out first: a verifier may be waiting for it.
            return 0.0
        rows = self._plan_catching_up()
        rows += self._plan_growth()
        kv_tokens = sum(session.num_tokens for session in {each.session for each in self._expansions})
        return self._facts.device.seconds(rows, num_sessions=len(self._sessions), kv_tokens=kv_tokens)

    def _plan_catching_up(self) -> int:
        rows = 0
        for session in self._sessions.values():
            room = self._facts.device.max_rows - rows
            if session.num_missing <= 0 or room <= 0:
                continue
            count = min(room, session.num_missing)
            session.computed_to = session.computed + count
            rows += count
            if session.num_missing == count and session.growth.wants_nodes:
                self._expansions.append(_Expansion(session=session, node=session.mirror.tree.root))
        return rows

    def _plan_growth(self) -> int:
        candidates = [
            (session.mirror.tree.survival(node), session, node)
            for session in self._sessions.values()
            for node in session.frontier()[: self._facts.rows_per_session]
        ]
        candidates.sort(key=lambda entry: -entry[0])
        chosen = candidates[: self._facts.rows]
        for _, session, node in chosen:
            session.expanded.add(node.node_id)
            self._expansions.append(_Expansion(session=session, node=node))
        return len(chosen)

    def end_step(self) -> Sequence[DraftNodes]:
        """Ends the step; returns what it has to say."""
        expansions, self._expansions = self._expansions, []
        for each in expansions:
            each.session.expand(each.node, self._guesses(each))
        for session in self._sessions.values():
            session.computed = max(session.computed, session.computed_to)
            nodes = session.push()
            if nodes is not None:
                self._said.append(nodes)
        said, self._said = self._said, []
        return said

    def _guesses(self, each: _Expansion) -> Guesses:
        # Position 0 is the prompt's last token.
        position = each.node.position + 2 - each.session.mirror.prompt_len
        if not is_right(each.node):
            # Some hundred places stand for all that lie off the text.
            position = STRIDE * (1 + each.node.node_id % 8) + position % 32
        ranked = self._truth.guesses(each.session.number, position)
        return Guesses(ranked=list(ranked[: self._facts.width]))


def is_right(node: Node) -> bool:
    """Whether all tokens from the root down to the node are the target's."""
    step: Node | None = node
    while step is not None and step.state is not NodeState.COMMITTED:
        if step.token_id != RIGHT:
            return False
        step = step.parent
    return True
