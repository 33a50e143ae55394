"""The loops of verifier and drafter without a model: the schedulers of `core`, a clock, and a text.

The text's token at each position is that position. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count as numbers_from
from typing import Any

from paceline.core.acceptance_rules import Verdict
from paceline.core.draft_policy import FixedGamma, Goodput
from paceline.core.drafter_tier import DrafterTier
from paceline.core.errors import RemoteProtocolError
from paceline.core.messages import (
    Commit,
    CommittedTokens,
    Drafts,
    GenerateRequest,
    LaggingSession,
    ModelIdentity,
    OpenSession,
    PositionLogprobs,
    ToDrafter,
    ToVerifier,
)
from paceline.core.pages import BLOCK_SIZE, BlockPool, SlotPool
from paceline.core.params import METHODS, SamplingParams, SpeculationParams
from paceline.core.target_events import DraftsArrived, LinkChanged, TargetLimits
from paceline.core.tree import verified_nodes, walk
from paceline.engine.draft_plan import DraftPlan
from paceline.engine.draft_scheduler import DraftLimits, DraftScheduler, VerifierLeft, VerifierMessages
from paceline.engine.draft_session import DraftSession, Offer
from paceline.engine.planned_step import StepPlan
from paceline.engine.scheduler import Scheduler
from paceline.engine.target_session import TargetSession
from paceline.forest import NONE, ROOT, Forest, Guesses
from tests.support.guesses import NodeGuess, SessionDrafts, by_session, each_commit, to_commits, to_drafts

DRAFTER = "drafter:1"
VOCAB_SIZE = 10_000
MODEL = ModelIdentity(name="text", vocab_hash="text", vocab_size=VOCAB_SIZE, context_len=4096)
WRONG = VOCAB_SIZE - 1
# Neither loop needs more steps than this to come to rest.
MANY_STEPS = 1000


def text(prompt_len: int, count: int) -> list[int]:
    """What the target generates after a prompt."""
    return list(range(prompt_len, prompt_len + count))


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
class VerifierLoop:
    """A verifier's scheduler, the clock, and a target whose next token is the position it stands at."""

    num_blocks: int = 64
    max_num_seqs: int = 8
    max_rows: int = 64
    policy: Goodput = field(default_factory=Policy)
    now_s: float = 0.0
    told: list[ToDrafter | Commit] = field(default_factory=list)
    heard: dict[str, list[CommittedTokens]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.scratch = SlotPool(first_block=self.num_blocks, num_blocks=1 + self.max_rows // BLOCK_SIZE)
        limits = TargetLimits(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_rows)
        self.scheduler = Scheduler(
            pool=self.pool,
            scratch=self.scratch,
            limits=limits,
            policy=self.policy,
            tier=DrafterTier(VOCAB_SIZE, Forest(METHODS)),
        )
        self.sessions: list[TargetSession] = []
        self._num_guessed = 0

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
        session = TargetSession(
            replace(request, **changes),  # type: ignore[arg-type]
            len(self.sessions),
            MODEL,
            pool=self.pool,
            max_model_len=4096,
            calibrations={},
            drafter_address=DRAFTER,
            forest=self.scheduler.forest,
            submitted_s=self.now_s,
            price=self.policy.price,
        )
        self.sessions.append(session)
        self.heard[name] = []
        self.scheduler.submit(session)
        return session

    def drafter(self, *, up: bool = True) -> None:
        """The stream to the drafter is up, or lost."""
        self.scheduler.change_link(LinkChanged(address=DRAFTER, up=up), self.now_s)
        self._pass_on()

    def say(self, *messages: ToVerifier) -> None:
        """The drafter says something."""
        self.scheduler.receive(DraftsArrived(address=DRAFTER, messages=messages, arrived_s=self.now_s))

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
        """Plans a step, runs it, and commits what the target chose."""
        plan = self.scheduler.plan(self.now_s)
        self._hear(self.scheduler.take_outcomes())
        self._pass_on()
        self.now_s += seconds
        for part in [part for part in plan.parts if part.judged]:
            told = [PositionLogprobs(token_id=position + 1, logprob=-1.0) for position in part.judged]
            self._hear([(part.session.serial, part.session.hand_out_prompt(told))])
        judged = [
            (part, self._judge(part.session, plan.guesses_of(place)))
            for place, part in enumerate(plan.parts)
            if part.commits
        ]
        self._hear(self.scheduler.commit(plan, judged, self.now_s))
        self.scheduler.moves.clear()
        self.scheduler.end_step(plan, self.now_s)
        self.report = self.scheduler.take_report(plan)
        self._pass_on()
        return plan

    @staticmethod
    def _judge(session: TargetSession, guesses: Guesses) -> Verdict:
        root, nodes = verified_nodes(session.tokens, guesses, session.tree.drafts)
        tokens = walk(root, nodes, lambda node: node.position + 1)
        return Verdict(token_ids=tuple(session.until_end(tokens)))

    def run(self) -> None:
        """Steps until every session has ended."""
        for _ in range(MANY_STEPS):
            if not self.scheduler.num_sessions:
                return
            self.step()
        raise AssertionError("sessions did not end")

    def tokens(self, name: str) -> list[int]:
        """What a session has given."""
        return [token for each in self.heard[name] for token in each.token_ids]

    def _hear(self, outcomes: Sequence[tuple[int, object]]) -> None:
        for serial, outcome in outcomes:
            assert isinstance(outcome, CommittedTokens)
            self.heard[self.sessions[serial].session_id].append(outcome)

    def _pass_on(self) -> None:
        to_drafters, broken = self.scheduler.tier.take()
        assert not broken
        self.told += each_commit(to_drafters.get(DRAFTER, []))


@dataclass
class DrafterLoop:
    """A drafter's scheduler, the clock, and a draft model that guesses the text, as sure of it as `sure` says.

    Its second guess is always wrong, and a tenth as likely.

    Attributes:
        said: What verifiers were told, by their streams.
        broken: Streams that were reset, and why.
        moved: KV that was moved, from slot to slot.
    """

    num_blocks: int = 64
    num_scratch_blocks: int = 16
    width: int = 1
    max_rows: int = 16
    max_rows_per_session: int = 4
    max_num_batched_tokens: int = 256
    max_num_seqs: int = 16
    context_len: int = 4096
    feature_width: int = 0
    sure: dict[str, float] = field(default_factory=dict)
    now_s: float = 0.0
    said: dict[int, list[ToVerifier]] = field(default_factory=dict)
    broken: dict[int, RemoteProtocolError] = field(default_factory=dict)
    moved: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks)
        self.scratch = SlotPool(first_block=self.num_blocks, num_blocks=self.num_scratch_blocks)
        self._numbers = numbers_from(1)
        self._named: dict[tuple[int, str], int] = {}
        limits = DraftLimits(
            width=self.width,
            max_rows=self.max_rows,
            max_rows_per_session=self.max_rows_per_session,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
        )
        self.scheduler = DraftScheduler(
            pool=self.pool,
            scratch=self.scratch,
            limits=limits,
            identity=replace(MODEL, context_len=self.context_len),
            feature_width=self.feature_width,
        )

    def session(self, name: str, link: int = 1) -> DraftSession:
        """A session that the drafter knows."""
        return self.scheduler._sessions[link, self.number(name, link)]

    def number(self, name: str, link: int = 1) -> int:
        """A session's number, which it has before the drafter knows it, and when it is opened anew."""
        return self._named.setdefault((link, name), next(self._numbers))

    def hear(self, *messages: ToDrafter, link: int = 1) -> None:
        """A verifier says something."""
        self.scheduler.handle(VerifierMessages(link=link, messages=messages), self.now_s)
        self.moved += self.scheduler.moves
        self.scheduler.moves.clear()

    def open(self, name: str, prompt_len: int = 5, *, link: int = 1, **changes: object) -> None:
        """A verifier opens a session; its prompt is the beginning of the text."""
        opened = OpenSession(
            session_id=name,
            epoch=1,
            number=self.number(name, link),
            token_ids=tuple(range(prompt_len)),
            prompt_len=prompt_len,
            sampling=SamplingParams(max_tokens=50),
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
        self.scheduler.handle(VerifierLeft(link=link), self.now_s)

    def step(self, seconds: float = 0.01) -> DraftPlan:
        """Plans a step, runs it, and says what is due."""
        plan = self.scheduler.plan(self.now_s)
        self.now_s += seconds
        offers = [self._offer(part.session, ROOT, 0) for part in plan.catching_up if part.expands]
        offers += [self._offer(each.session, each.slot, len(each.path)) for each in plan.growing]
        self.scheduler.trees.grow(offers)
        self.scheduler.end_step()
        said, broken = self.scheduler.take()
        for link, messages in said.items():
            self.said.setdefault(link, []).extend(messages)
        self.broken |= broken
        return plan

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

    def _offer(self, session: DraftSession, slot: int, depth: int) -> Offer:
        sure = self.sure.get(session.session_id, 0.9)
        token_ids, confidences = (len(session.tokens) + depth, WRONG), (sure, sure / 10)
        return Offer(session, slot, token_ids[: self.width], confidences[: self.width])
