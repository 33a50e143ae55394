"""The rejection rule exactly as served but for the models: every outcome of every random number is played.

Both ends of a session, what goes over the wire, the samplers and the rule are the real ones; logits come from tables
and the random numbers from the test. A play is run anew for every outcome, so the law of what it commits is an exact
sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from paceline import wire
from paceline.core.acceptance import SparseDraft, sparse_draft
from paceline.core.link import commit, merge
from paceline.core.messages import Commit, Commits, Drafts, GenerateRequest, ModelIdentity
from paceline.core.noise import DRAFT_STREAM
from paceline.core.pages import BlockPool, SlotPool
from paceline.core.params import DRAFT_MODEL, METHODS, REJECTION, SamplingParams, SpeculationParams
from paceline.engine import draft_session, target_session
from paceline.engine.draft_session import DraftSession
from paceline.engine.drafted_trees import DraftedTrees
from paceline.engine.target_session import TargetSession
from paceline.forest import ROOT, Forest, rows_of
from tests.support.guesses import to_commits
from tests.support.laws import dense
from tests.support.rounds import judge
from tests.support.trees import nodes_of
from tests.unit.core.toy_models import FloatArray, Law, Model, Tokens, cells, prefixes, uniform_cells

T = TypeVar("T")
PROMPT = (0,)
LONGEST = 6


class Chance:
    """One of all ways things may turn out: the choices on record, then the first of every choice."""

    def __init__(self, record: Sequence[int] = ()) -> None:
        self.record = list(record)
        self.sizes: list[int] = []
        self.mass = 1.0

    def pick(self, options: Sequence[tuple[T, float]]) -> T:
        place = len(self.sizes)
        if place == len(self.record):
            self.record.append(0)
        self.sizes.append(len(options))
        value, mass = options[self.record[place]]
        self.mass *= mass
        return value

    def next(self) -> Chance | None:
        """The way after this one; None if it was the last."""
        record = self.record
        while record and record[-1] + 1 == self.sizes[len(record) - 1]:
            record = record[:-1]
        return Chance([*record[:-1], record[-1] + 1]) if record else None


def law_of(play: Callable[[Chance], Tokens]) -> Law:
    """The exact law of what a play commits."""
    law: Law = defaultdict(float)
    chance: Chance | None = Chance()
    while chance is not None:
        law[play(chance)] += chance.mass
        chance = chance.next()
    return law


@dataclass(frozen=True, kw_only=True)
class ToyModel:
    """Logits by the tokens after the prompt."""

    logits: dict[Tokens, npt.NDArray[np.float32]]

    @classmethod
    def random(cls, seed: int, vocab: int) -> ToyModel:
        rng = np.random.default_rng(seed)
        return cls(logits={p: rng.normal(0, 1.2, vocab).astype(np.float32) for p in prefixes(vocab, LONGEST)})

    @cached_property
    def laws(self) -> Model:
        widened = {prefix: np.exp(row.astype(np.float64)) for prefix, row in self.logits.items()}
        return {prefix: row / row.sum() for prefix, row in widened.items()}


class Play:
    """One session between one verifier and its drafter.

    Args:
        target: The target model.
        draft: The draft model.
        chance: How things turn out.
    """

    def __init__(self, target: ToyModel, draft: ToyModel, chance: Chance) -> None:
        self.target, self.draft, self.chance = target, draft, chance
        self.vocab = len(target.logits[()])
        self.drawn: dict[tuple[int, ...], float] = {}
        self.last_draft: SparseDraft | None = None
        self.verdict: list[float] = []
        identity = ModelIdentity(name="toy", vocab_hash="toy", vocab_size=self.vocab, context_len=64)
        self.identity, self.pool = identity, BlockPool(8)
        request = GenerateRequest(
            session_id="s",
            epoch=1,
            prompt_token_ids=PROMPT,
            sampling=SamplingParams(max_tokens=LONGEST + 1),
            speculation=SpeculationParams(acceptance=REJECTION),
        )
        self.session = TargetSession(
            request,
            1,
            identity,
            max_model_len=64,
            pool=self.pool,
            forest=Forest(METHODS),
            calibrations={},
            acceptance=REJECTION,
            submitted_s=0.0,
        )
        self.under_way: list[Drafts] = []
        self.sent_len = 0
        self.restart()

    @property
    def committed(self) -> Tokens:
        return tuple(self.session.tokens[len(PROMPT) :])

    def restart(self) -> None:
        """A drafter starts, or another one does after the first has died."""
        self.under_way.clear()
        self.sent_len = self.session.committed_len
        opened = replace(self.session.link.open(), price=0.0, room=64)
        opened = wire.draft_request_from_pb(wire.draft_request_to_pb([opened]))[1][0]
        self.drafted = DraftSession(opened, self.identity, self.pool)  # type: ignore[arg-type]
        self.trees = DraftedTrees(SlotPool(first_block=8, num_blocks=2), 64)
        self.trees.add(self.drafted)

    def grow(self, depth: int) -> None:
        """The drafter grows its chain to a depth, and its message is under way."""
        committed, path = tuple(self.drafted.tokens[len(PROMPT) :]), list[int]()
        # The nodes of a chain lie one after the other.
        for slot in range(ROOT, depth - 1):
            if self.trees.wants_guesses(self.drafted, slot):
                row = self.draft.logits[*committed, *path]
                token_id = self.drafted.draw(path, row, self.trees.node_id(self.drafted, slot))
                self.trees.grow_chains([(self.drafted, slot, token_id)])
            path.append(int(self.trees.forest.arrays.nodes["token"][self.drafted.row, slot + 1]))
        self.under_way += [message for _, message in self.trees.push(at_once=True)]

    def deliver(self) -> None:
        """The verifier receives what is under way."""
        for message in self.under_way:
            received = wire.draft_response_from_pb(wire.draft_response_to_pb([message]))[1][0]
            assert isinstance(received, Drafts)
            self.session.link.check(int(received.base_lens[0]), has_distributions=bool(received.distributions))
            tree = self.session.tree
            merge(tree.forest, DRAFT_MODEL, rows_of([tree.row]), received, {0: tree})
        self.under_way.clear()

    def verify(self, gamma: int) -> None:
        """One step of the verifier."""
        chain = nodes_of(self.session.tree)[:gamma]
        tokens = tuple(node.token_id for node in chain)
        paths = [(*self.committed, *tokens[:depth]) for depth in range(len(tokens) + 1)]
        drafts = [dense(node.draft, self.vocab) for node in chain if node.draft is not None]
        self.verdict = self.chance.pick(list(uniform_cells([self.target.laws[p] for p in paths], drafts, tokens)))
        guesses = [(place - 1, token) for place, token in enumerate(tokens)]
        found = judge(self.session, guesses, np.array([self.target.logits[path] for path in paths]))
        commit(self.session.tree.forest, [self.session.link], found.ends, found.tokens, found.chances)

    def tell(self) -> None:
        """The drafter hears of all commits."""
        sent = to_commits(Commit(1, self.sent_len, self.session.tokens[self.sent_len :], price=0.0, room=64))
        self.sent_len = self.session.committed_len
        received = wire.draft_request_from_pb(wire.draft_request_to_pb([sent]))[1][0]
        assert isinstance(received, Commits)
        fresh = self.drafted.receive(next(iter(received)))
        assert isinstance(fresh, list)
        base_len = len(self.drafted.tokens) - len(fresh)
        _, nodes = self.trees.commit([(self.drafted, base_len, fresh)])
        self.under_way += [message for _, message in nodes]

    # Random numbers

    def uniforms(self, seed: int, stream: int, position: int, base_len: int, parent_id: int = 0) -> tuple[float, float]:
        """Stands in for `paceline.core.noise.uniforms`: the same key gives the same number, another a fresh one."""
        del seed
        if stream != DRAFT_STREAM:
            return self.verdict[position - base_len], self.verdict[-1]
        key = (position, base_len, parent_id)
        if key not in self.drawn:
            assert self.last_draft is not None
            self.drawn[key] = self.chance.pick(cells(cuts_of(self.last_draft)))
        return self.drawn[key], 0.0

    def sparse_draft(self, probs: FloatArray) -> SparseDraft:
        """Watches `paceline.core.acceptance.sparse_draft`."""
        self.last_draft = sparse_draft(probs)
        return self.last_draft


def cuts_of(draft: SparseDraft) -> list[float]:
    weights = np.cumsum(draft.weights)
    return list(weights / weights[-1])


def played(monkeypatch: pytest.MonkeyPatch, models: tuple[ToyModel, ToyModel], story: Callable[[Play], None]) -> Law:
    """The law of what a story commits."""

    def play(chance: Chance) -> Tokens:
        it = Play(*models, chance)
        with monkeypatch.context() as patch:
            patch.setattr(draft_session, "uniforms", it.uniforms)
            patch.setattr(target_session, "uniforms", it.uniforms)
            patch.setattr(draft_session, "sparse_draft", it.sparse_draft)
            story(it)
        return it.committed

    return law_of(play)


def stories() -> Iterator[tuple[str, Callable[[Play], None]]]:
    """What may happen between a verifier and its drafter, by name."""

    def one_round(gamma: int) -> Callable[[Play], None]:
        def story(play: Play) -> None:
            play.grow(gamma)
            play.deliver()
            play.verify(gamma)

        return story

    for gamma in (1, 2, 3):
        yield f"gamma {gamma}", one_round(gamma)

    def goes_on(play: Play) -> None:
        play.grow(2)
        play.deliver()
        play.verify(1)
        play.tell()
        play.grow(2)
        play.deliver()
        play.verify(2)

    yield "what was not verified stays, and is drawn on", goes_on

    def late(play: Play) -> None:
        play.grow(2)
        play.verify(0)
        play.deliver()
        play.verify(1)
        play.tell()
        play.grow(1)
        play.deliver()
        play.verify(1)

    yield "late drafts", late

    def dies(play: Play) -> None:
        play.grow(3)
        play.deliver()
        play.verify(1)
        play.verify(2)

    yield "the drafter dies in mid-chain", dies

    def restarts(play: Play) -> None:
        play.grow(2)
        play.deliver()
        play.verify(1)
        play.restart()
        play.grow(2)
        play.deliver()
        play.verify(2)

    yield "another drafter takes over in mid-chain", restarts

    def forgets(play: Play) -> None:
        play.grow(2)
        play.deliver()
        play.drafted.give_up_pages()
        play.verify(1)
        play.tell()
        play.grow(2)
        play.deliver()
        play.verify(2)

    yield "a drafter forgets its chain and draws another beside it", forgets


STORIES = dict(stories())
