"""Engines on devices that count: the token of their text at each position is that position. The test is the clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count as numbers_from
from typing import Any

import numpy as np

from paceline.core.calibration import GREEDY_SHARPNESS, NUM_RANKED
from paceline.core.draft_policy import FixedGamma, Goodput
from paceline.core.errors import PacelineError, RemoteProtocolError
from paceline.core.features import Features
from paceline.core.messages import (
    Commit,
    Drafts,
    GenerateRequest,
    LaggingSession,
    ModelIdentity,
    OpenSession,
    StepCommit,
    ToDrafter,
    ToVerifier,
)
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.target_events import (
    Cancel,
    DrafterNews,
    DraftsArrived,
    LinkChanged,
    StepReport,
    Submit,
    TargetLimits,
    TargetOutput,
)
from paceline.engine.batch import Batch
from paceline.engine.draft_plan import DraftPlan
from paceline.engine.draft_scheduler import DraftLimits, VerifierLeft, VerifierMessages
from paceline.engine.draft_session import DraftSession
from paceline.engine.drafter import DraftEngine
from paceline.engine.levels import draft_by_levels
from paceline.engine.loop import run_sync
from paceline.engine.model import Burst, Drafted
from paceline.engine.pending import HostPending, Ranks, VerifyRequest
from paceline.engine.planned_step import StepPlan
from paceline.engine.source_interface import AnySource
from paceline.engine.target import TargetEngine
from paceline.engine.target_session import TargetSession
from paceline.forest import NONE
from tests.support.clock import Clock
from tests.support.guesses import NodeGuess, SessionDrafts, by_session, each_commit, to_commits, to_drafts
from tests.support.steps import Step, steps_of

DRAFTER = "drafter:1"
VOCAB_SIZE = 1000
WRONG = VOCAB_SIZE - 1
MODEL = ModelIdentity(name="text", vocab_hash="text", vocab_size=VOCAB_SIZE, context_len=4096)
Sureness = Callable[[np.ndarray], np.ndarray | float]
# No engine needs more steps than this to come to rest.
MANY_STEPS = 1000


def text(prompt_len: int, count: int) -> list[int]:
    """What the target generates after a prompt."""
    return list(range(prompt_len, prompt_len + count))


class EmptyCache:
    """Holds nothing, and remembers what was moved from slot to slot."""

    def __init__(self, feature_width: int) -> None:
        self.moved: list[tuple[int, int]] = []
        self._feature_width = feature_width

    def apply_moves(self, moves: list[tuple[int, int]]) -> None:
        self.moved += moves
        moves.clear()

    def features(self, slots: Sequence[int]) -> Features:
        return np.zeros((len(slots), self._feature_width), np.float32)


class CountingDevice:
    """A model without weights.

    Args:
        sure: Of positions, how sure it is of the token after each; the next best, a tenth as likely, is always wrong.

    Attributes:
        step_s: What a step takes.
        broken_at: Positions after which it gives nothing to choose from.
    """

    state_width = 0

    def __init__(self, clock: Clock, sure: Sureness, feature_width: int = 0) -> None:
        self.step_s = 0.0
        self.broken_at: set[int] = set()
        self.feature_width = feature_width
        self._clock, self._sure = clock, sure

    def new_cache(self, num_blocks: int) -> EmptyCache:
        del num_blocks
        return EmptyCache(self.feature_width)

    def launch(self, batch: Batch, cache: EmptyCache, wanted: VerifyRequest | Ranks | None) -> HostPending:
        del cache, wanted
        self._clock.now_s += self.step_s
        positions = batch.positions[batch.logit_rows] + (self.feature_width > 0)
        sure = np.broadcast_to(self._sure(positions), positions.shape)[:, None]
        rest = (1.0 - 1.1 * sure) / (NUM_RANKED - 2)
        shares = np.repeat(rest, VOCAB_SIZE, axis=1)
        shares[:, WRONG] = sure[:, 0] / 10
        np.put_along_axis(shares, positions[:, None] + 1, sure, axis=1)
        # So that what becomes of it, sharpened, is as sure as that.
        logits = (GREEDY_SHARPNESS * np.log(shares)).astype(np.float32)
        logits[np.isin(positions, [*self.broken_at])] = np.nan
        return HostPending(logits)

    def draft(self, batch: Batch, cache: EmptyCache, burst: Burst) -> Drafted:
        states = cache.features if self.feature_width else None
        return draft_by_levels(lambda rows, ranks: self.launch(rows, cache, ranks), batch, burst, states)


class Policy(FixedGamma):
    """Always the four best nodes, and the price that the test sets."""

    price = 0.0

    def __init__(self, price: float = 0.0) -> None:
        super().__init__(gamma=4)
        self.price = price

    @property
    def drafts(self) -> bool:
        """See `Goodput`."""
        return self.price < 1.0


@dataclass
class Verifier:
    """A verifier's engine on a counting device; its drafter is the test.

    Attributes:
        told: What the drafter was told.
        heard: What clients were told, by the names of their sessions.
        errors: Why sessions failed.
        report: Of the last step.
    """

    num_blocks: int = 64
    max_num_seqs: int = 8
    max_rows: int = 64
    policy: Goodput = field(default_factory=Policy)
    clock: Clock = field(default_factory=Clock)
    sources: Sequence[AnySource] = ()
    told: list[ToDrafter | Commit] = field(default_factory=list)
    heard: dict[str, list[Step]] = field(default_factory=dict)
    errors: dict[str, PacelineError] = field(default_factory=dict)
    report: StepReport = field(default_factory=StepReport)

    def __post_init__(self) -> None:
        self.device = CountingDevice(self.clock, lambda _: 0.9)
        self.engine = TargetEngine(
            decoder=self.device,
            identity=MODEL,
            num_blocks=self.num_blocks,
            limits=TargetLimits(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_rows),
            policy=self.policy,
            clock=self.clock,
            sources=self.sources,
        )
        self.scheduler, self.pool, self.scratch = self.engine.scheduler, self.engine.pool, self.engine._scratch
        self.sessions: list[TargetSession] = []
        self._num_guessed = 0
        self._plan = self.scheduler.plan
        self.scheduler.plan = self._watch_plan  # type: ignore[method-assign]

    def _watch_plan(self, now_s: float) -> StepPlan:
        self.plan = self._plan(now_s)
        return self.plan

    def submit(self, name: str, prompt_len: int = 5, max_tokens: int = 20, **changes: object) -> TargetSession:
        """A request arrives; its prompt is the beginning of the text."""
        request = GenerateRequest(
            session_id=name,
            epoch=1,
            prompt_token_ids=tuple(range(prompt_len)),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            speculation=SpeculationParams(),
            cache_salt=name,
        )
        number = len(self.sessions)
        self.heard[name] = []
        self.engine.handle(
            Submit(request=replace(request, **changes), number=number, drafter_address=DRAFTER)  # type: ignore[arg-type]
        )
        session = self.scheduler.session(number)
        assert session is not None
        self.sessions.append(session)
        return session

    def leave(self, session: TargetSession) -> None:
        """A session's client leaves."""
        self.engine.handle(Cancel(number=session.number))

    def drafter(self, *, up: bool = True) -> None:
        """The stream to the drafter is up, or lost."""
        self.engine.handle(LinkChanged(address=DRAFTER, up=up))

    def say(self, *messages: ToVerifier) -> None:
        """The drafter says something."""
        self.engine.handle(DraftsArrived(address=DRAFTER, messages=messages, arrived_s=self.clock.now_s))

    def draft(self, session: TargetSession, *, right: int, wrong: int = 0) -> None:
        """The drafter guesses a chain of so many right tokens, and so many wrong ones after them."""
        base_len = session.committed_len
        tokens = text(base_len, right) + [WRONG] * wrong
        ids = range(self._num_guessed + 1, self._num_guessed + 1 + len(tokens))
        self._num_guessed += len(tokens)
        parents = (0, *ids[:-1])
        nodes = [NodeGuess(*each, 0.9) for each in zip(ids, parents, tokens, strict=True)]
        self.say(to_drafts(SessionDrafts(session.link.number, base_len, nodes)))

    def step(self, seconds: float = 0.01) -> StepPlan:
        """One step, which takes so long."""
        self.device.step_s = seconds
        output = run_sync(self.engine.step(tell=self._hear))
        self.report = output.report
        self._hear(output)
        return self.plan

    def run(self) -> None:
        """Steps until every session has ended."""
        for _ in range(MANY_STEPS):
            if not self.engine.num_sessions:
                return
            self.step()
        raise AssertionError("sessions did not end")

    def tokens(self, name: str) -> list[int]:
        """What a session has given."""
        return [token for each in self.heard[name] for token in each.token_ids]

    def _hear(self, output: DrafterNews) -> None:
        commit = output.commit if isinstance(output, TargetOutput) else StepCommit()
        for number, error in commit.errors.items():
            self.errors[self.sessions[number].session_id] = error
        for number, step in steps_of(commit):
            self.heard[self.sessions[number].session_id].append(step)
        assert not output.broken_links
        self.told += each_commit(output.to_drafters.get(DRAFTER, []))


@dataclass
class Drafter:
    """A drafter's engine on a counting device; its verifiers are the test.

    Attributes:
        said: What verifiers were told, by their streams.
        broken: Streams that were reset, and why.
        moved: KV that was moved, or is before the next step, from slot to slot.
    """

    num_blocks: int = 64
    width: int = 1
    max_rows: int = 16
    max_rows_per_session: int = 4
    max_levels: int = 1
    max_num_batched_tokens: int = 256
    max_num_seqs: int = 16
    context_len: int = 4096
    feature_width: int = 0
    sure: Sureness = lambda _: 0.9
    clock: Clock = field(default_factory=Clock)
    said: dict[int, list[ToVerifier]] = field(default_factory=dict)
    broken: dict[int, RemoteProtocolError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers = numbers_from(1)
        self._named: dict[tuple[int, str], int] = {}
        limits = DraftLimits(
            width=self.width,
            max_rows=self.max_rows,
            max_rows_per_session=self.max_rows_per_session,
            max_levels=self.max_levels,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
        )
        self.device = CountingDevice(self.clock, self.sure, self.feature_width)
        self.engine = DraftEngine(
            decoder=self.device,
            identity=replace(MODEL, context_len=self.context_len),
            num_blocks=self.num_blocks,
            limits=limits,
            clock=self.clock,
        )
        self.scheduler, self.pool = self.engine.scheduler, self.engine.pool
        self.scratch = self.scheduler.trees._scratch
        self._plan = self.scheduler.plan
        self.scheduler.plan = self._watch_plan  # type: ignore[method-assign]

    @property
    def moved(self) -> list[tuple[int, int]]:
        return [*self.engine.cache.moved, *self.scheduler.moves]

    def _watch_plan(self, now_s: float) -> DraftPlan:
        self.plan = self._plan(now_s)
        return self.plan

    def session(self, name: str, link: int = 1) -> DraftSession:
        """A session that the drafter knows."""
        return self.scheduler._sessions[link, self.number(name, link)]

    def number(self, name: str, link: int = 1) -> int:
        """A session's number, which it has before the drafter knows it, and when it is opened anew."""
        return self._named.setdefault((link, name), next(self._numbers))

    def hear(self, *messages: ToDrafter, link: int = 1) -> None:
        """A verifier says something."""
        self.engine.handle(VerifierMessages(link=link, messages=messages))

    def open(self, name: str, prompt_len: int = 5, *, link: int = 1, **changes: object) -> None:
        """A verifier opens a session; its prompt is the beginning of the text."""
        opened = OpenSession(
            session_id=name,
            epoch=1,
            number=self.number(name, link),
            token_ids=tuple(range(prompt_len)),
            prompt_len=prompt_len,
            sampling=SamplingParams(max_tokens=50, temperature=0.0),
            price=0.0,
            room=4,
            cache_salt=name,
        )
        self.hear(replace(opened, **changes), link=link)  # type: ignore[arg-type]

    def commit(self, name: str, *token_ids: int, base_len: int | None = None, link: int = 1, **changes: object) -> None:
        """A verifier commits tokens, after those that the drafter knows unless `base_len` says otherwise."""
        known = len(self.session(name, link).tokens) if base_len is None else base_len
        commit = Commit(self.number(name, link), known, [*token_ids], price=0.0, room=4)
        self.hear(to_commits(commit._replace(**changes)), link=link)  # type: ignore[arg-type]

    def leave(self, link: int) -> None:
        """A verifier's stream ends."""
        self.engine.handle(VerifierLeft(link=link))

    def step(self, seconds: float = 0.01) -> DraftPlan:
        """One step, which takes so long; what it has computed."""
        self.device.step_s = seconds
        output = run_sync(self.engine.step())
        for link, messages in output.to_verifiers.items():
            self.said.setdefault(link, []).extend(messages)
        self.broken |= output.broken_links
        return self.plan

    def run(self) -> int:
        """Steps until there is nothing to do; returns how many steps that took."""
        for count in range(MANY_STEPS):
            if not self.scheduler.has_work:
                return count
            self.step()
        raise AssertionError("the drafter did not come to rest")

    def guessed(self, name: str, link: int = 1) -> list[int]:
        """Tokens of all nodes that a session's verifier was sent since the last call, in their order."""
        number = self.session(name, link).number
        drafts = [each for each in self.said.pop(link, []) if isinstance(each, Drafts)]
        return [
            node.token_id
            for each in drafts
            for mine in by_session(each)
            if mine.number == number
            for node in mine.nodes
        ]

    def lagging(self, link: int = 1) -> list[tuple[str, int]]:
        """Sessions that were told to lag since the last call, and the tokens that each has."""
        said = self.said.pop(link, [])
        names = {number: name for (_, name), number in self._named.items()}
        return [(names[each.number], each.have_len) for each in said if isinstance(each, LaggingSession)]

    def tree(self, name: str, link: int = 1) -> list[int]:
        """Tokens of the nodes of a session that its verifier knows or is to know."""
        nodes = self._nodes(name, link)
        return nodes["token"][nodes["id"] > 0].tolist()

    def kv(self, name: str, link: int = 1) -> list[int]:
        """Scratch slots of a session's nodes."""
        kv = self._nodes(name, link)["kv"]
        return kv[kv != NONE].tolist()

    def _nodes(self, name: str, link: int) -> Any:
        forest, row = self.scheduler.trees.forest, self.session(name, link).row
        return forest.arrays.nodes[row, : forest.count(row)]
