"""A verifier, its drafter and their load as a replay: the real controller, and a world whose truth is known.

Everything a policy meets is a function of the seed alone: the target's tokens, the drafter's guesses and their
confidence, the time a step takes. Coupled verification makes the token streams of all policies equal, so the
replay is exact: two policies at the same position of a session see the same draft tree.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from paceline.core.calibration import Calibration, SessionOffset
from paceline.core.draft_policy import DraftPolicy
from paceline.core.drafter_worth import Demand
from paceline.core.messages import NodeGuess
from paceline.core.params import DRAFT_MODEL
from paceline.core.step_time import StepCost, StepMode
from paceline.core.survivals import SessionSurvivals
from paceline.core.tree import DraftTree, Node, best_first, walk
from paceline.planning.guesses import RIGHT, STRIDE, DrawnGuesses, philox

DEPTH = 10
# Levels that are drafted again before the next step after a miss has emptied the tree.
DEPTH_AFTER_MISS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class World(DrawnGuesses):
    """The truth that no policy sees: what the drafter guesses, and what steps take.

    Args:
        cost: Seconds of a plain step by rows.
        drafting_overhead: Share by which steps take longer while drafters work.
        noise: Spread of the step times that policies observe; one in a hundred is three times as long.
    """

    cost: StepCost
    drafting_overhead: float = 0.15
    noise: float = 0.08

    def seconds(self, rows: int, mode: StepMode) -> float:
        """Expected time of a step."""
        return self.cost.at(rows) * (1.0 + self.drafting_overhead * (mode is StepMode.DRAFTING))


@dataclass(slots=True)
class ReplayedSession:
    """A session as the replayed verifier has it."""

    number: int
    committed_len: int = 1
    next_node_id: int = 1
    missed: bool = True
    drafted: bool = False
    tree: DraftTree = field(default_factory=lambda: DraftTree(1))
    offset: SessionOffset = field(default_factory=SessionOffset)
    usual: SessionSurvivals = field(default_factory=SessionSurvivals)
    works: bool = False


class Policy(Protocol):
    """What picks the nodes of a replayed step.

    Its `mode` says whether drafters work during the coming step; of the optimum, during this one.
    """

    mode: StepMode

    def nodes(self, sessions: Sequence[ReplayedSession]) -> Sequence[Sequence[Node]]:
        """The nodes of each session."""

    def observe(self, rows: int, guesses: int, mode: StepMode, seconds: float) -> None:
        """Learns from a step."""


class RealPolicy:
    """A real policy."""

    def __init__(self, policy: DraftPolicy, cap: int) -> None:
        self._policy = policy
        self._cap = cap
        self.mode = StepMode.PLAIN

    def nodes(self, sessions: Sequence[ReplayedSession]) -> Sequence[Sequence[Node]]:
        """What the policy allocates."""
        demands = [Demand(tree=each.tree, cap=self._cap, answered=each.drafted, usual=each.usual) for each in sessions]
        allocation = self._policy.allocate(demands)
        for session, price in zip(sessions, allocation.prices, strict=True):
            session.works = price < 1.0
        self.mode = StepMode.DRAFTING if any(each.works for each in sessions) else StepMode.PLAIN
        return allocation.nodes

    def observe(self, rows: int, guesses: int, mode: StepMode, seconds: float) -> None:
        """Passes it on."""
        self._policy.observe(rows=rows, guesses=guesses, mode=mode, seconds=seconds)


class Optimum:
    """The calibrated optimum: knows true probabilities and true times, and changes its mind for nothing.

    With `clairvoyant` it knows the target's tokens too, and so verifies nothing in vain.
    """

    def __init__(self, world: World, cap: int, *, clairvoyant: bool) -> None:
        self._world = world
        self._cap = cap
        self._clairvoyant = clairvoyant
        self.mode = StepMode.DRAFTING

    def nodes(self, sessions: Sequence[ReplayedSession]) -> Sequence[Sequence[Node]]:
        """The best nodes; also settles whether this very step counts as one with drafters at work."""
        ranked = sorted(
            (
                (-self._survival(node, each.number), node.position - each.committed_len, index, node)
                for index, each in enumerate(sessions)
                for node in best_first(each.tree, MAX_CONSIDERED)
            ),
            key=lambda entry: entry[:3],
        )
        count = len(sessions)
        best, best_goodput, expected = 0, 0.0, float(count)
        for number, entry in enumerate([None, *ranked]):
            expected -= entry[0] if entry else 0.0
            goodput = expected / self._world.seconds(count + number, StepMode.DRAFTING)
            if goodput > best_goodput:
                best, best_goodput = number, goodput
        plain = count / self._world.seconds(count, StepMode.PLAIN)
        self.mode = StepMode.DRAFTING if best_goodput > plain else StepMode.PLAIN
        chosen: list[list[Node]] = [[] for _ in sessions]
        for _, _, index, node in ranked[: best if self.mode is StepMode.DRAFTING else 0]:
            if len(chosen[index]) < self._cap:
                chosen[index].append(node)
        return chosen

    def _survival(self, node: Node, session: int) -> float:
        survival, step = 1.0, node
        while step.parent is not None:
            right = float(step.token_id == RIGHT)
            survival *= right if self._clairvoyant else self._world.chance(step.guesses[DRAFT_MODEL], session)
            step = step.parent
        return survival

    def observe(self, rows: int, guesses: int, mode: StepMode, seconds: float) -> None:
        """Learns nothing: it knows everything."""


MAX_CONSIDERED = 24


@dataclass(slots=True)
class ReplayResult:
    """What a policy did with a load.

    Attributes:
        tokens: Committed, by number of sessions.
        seconds: Spent, by number of sessions.
        rows: Computed.
        verified: Draft tokens verified.
        accepted: Of these.
        switches: Changes between plain steps and steps with drafters at work.
        bins: For the calibration error: tenth of predicted survival -> [nodes, predicted sum, matched].
    """

    tokens: Counter[int] = field(default_factory=Counter)
    seconds: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    rows: int = 0
    verified: int = 0
    accepted: int = 0
    switches: int = 0
    bins: dict[int, list[float]] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Over the whole load."""
        return sum(self.tokens.values()) / sum(self.seconds.values())

    @property
    def calibration_error(self) -> float:
        """Expected calibration error of survival, over verified nodes."""
        total = sum(entry[0] for entry in self.bins.values())
        return sum(abs(entry[1] - entry[2]) for entry in self.bins.values()) / max(1.0, total)


class Replay:
    """One policy under one load.

    Args:
        world: The truth.
        policy: Picks nodes.
        load: Number of sessions from each time on: `(seconds, sessions)`, in order; the last entry ends it.
    """

    def __init__(self, world: World, policy: Policy, load: Sequence[tuple[float, int]]) -> None:
        self._world = world
        self._policy = policy
        self._load = load
        self._calibration = Calibration()
        self._sessions: list[ReplayedSession] = []
        self._num_born = 0
        self._num_steps = 0
        self._result = ReplayResult()

    def run(self) -> ReplayResult:
        """Replays the whole load."""
        now_s, stage = 0.0, 0
        while now_s < self._load[-1][0]:
            while stage + 1 < len(self._load) and self._load[stage + 1][0] <= now_s:
                stage += 1
            self._resize(self._load[stage][1])
            now_s += self._step()
        return self._result

    def _resize(self, count: int) -> None:
        del self._sessions[count:]
        while len(self._sessions) < count:
            self._sessions.append(ReplayedSession(number=self._num_born))
            self._num_born += 1

    def _step(self) -> float:
        for session in self._sessions:
            self._draft(session)
        before = self._policy.mode
        chosen = self._policy.nodes(self._sessions)
        mode = self._policy.mode if isinstance(self._policy, Optimum) else before
        tokens = sum(self._verify(*each) for each in zip(self._sessions, chosen, strict=True))
        count = len(self._sessions)
        guesses = sum(map(len, chosen))
        rows = count + guesses
        # Policies see noisy times; what counts is the expected one, or luck would decide between them.
        seconds = self._world.seconds(rows, mode)
        self._policy.observe(rows, guesses, mode, seconds * self._luck())
        self._result.tokens[count] += tokens
        self._result.seconds[count] += seconds
        self._result.rows += rows
        self._result.switches += self._policy.mode is not before
        self._num_steps += 1
        return seconds

    def _luck(self) -> float:
        rng = philox(self._world.seed, 3, self._num_steps, 0)
        accident = 3.0 if rng.random() < 0.01 else 1.0
        return float(np.exp(self._world.noise * rng.standard_normal())) * accident

    def _draft(self, session: ReplayedSession) -> None:
        """The drafter's work since the last step: nothing while it rests, less of it after a miss."""
        if isinstance(self._policy, Optimum) or session.works:
            if session.drafted:
                self._grow(session, DEPTH_AFTER_MISS if session.missed else DEPTH)
            session.drafted = True
        else:
            session.drafted = False

    def _grow(self, session: ReplayedSession, depth: int) -> None:
        def probability(_: str, confidence: float) -> float:
            return self._calibration.probability(confidence, session.offset)

        session.tree = DraftTree(session.committed_len, probability)
        path: list[tuple[Node, bool]] = [(session.tree.root, True)]
        for level in range(depth):
            grown: list[tuple[Node, bool]] = []
            for parent, is_true in path:
                position = parent.position + 1
                beside = position if is_true else position + STRIDE * (1 + level)
                for token, confidence in self._world.guesses(session.number, beside):
                    guess = NodeGuess(node_id=session.next_node_id, parent_id=0, token_id=token, confidence=confidence)
                    node = session.tree.add(parent, guess)
                    session.next_node_id += 1
                    if node is not None and confidence > 0.1:
                        grown.append((node, is_true and token == RIGHT))
            path = sorted(grown, key=lambda entry: -entry[0].log_weight)[:2]

    def _verify(self, session: ReplayedSession, nodes: Sequence[Node]) -> int:
        tree, result = session.tree, self._result
        for node in nodes:
            entry = result.bins.setdefault(int(10 * tree.survival(node)), [0.0, 0.0, 0.0])
            entry[0] += 1
            entry[1] += tree.survival(node)
            entry[2] += _all_right(node)
        tokens = walk(tree.root, nodes, lambda _: RIGHT)
        for _, confidence, matched in tree.outcomes(tokens):
            self._calibration.observe(confidence, session.offset, matched=matched)
        session.committed_len += len(tokens)
        session.missed = not tree.advance(tokens).hit
        if session.missed or not session.drafted:
            session.tree = DraftTree(session.committed_len)
        result.verified += len(nodes)
        result.accepted += len(tokens) - 1
        return len(tokens)


def _all_right(node: Node) -> bool:
    step: Node | None = node
    while step is not None and step.parent is not None:
        if step.token_id != RIGHT:
            return False
        step = step.parent
    return True
