"""Simulated drafters: the very draft scheduler of `core`, with a model that guesses what a profile says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from paceline.core.draft_plan import DraftPlan, Offer
from paceline.core.draft_scheduler import DraftScheduler, VerifierMessages
from paceline.core.messages import Drafts, ToDrafter
from paceline.core.pages import BLOCK_SIZE, BlockPool, SlotPool
from paceline.core.pairing import DrafterCandidate
from paceline.core.scheduled_draft_session import ScheduledDraftSession
from paceline.forest import ROOT
from paceline.planning.events import Events
from paceline.simulated.guesses import RIGHT, STRIDE, GuessSource
from paceline.simulated.profile import DrafterFacts, Profile

# Sessions are as long as the load makes them; drafters have enough context for all.
CONTEXT_LEN = 1 << 19
# Of a drafter inside a verifier.
LINK = 0
# What goes to verifiers, by their streams.
DraftsByLink = Mapping[int, Sequence[Drafts]]


class Verifier(Protocol):
    """Whatever drafts are sent to."""

    def receive(self, address: str, messages: Sequence[Drafts]) -> None:
        """The messages of a drafter's step arrive."""


class SimulatedDrafter:
    """Runs the draft scheduler's steps in simulated time.

    Args:
        facts: Of the draft model on its device.
        truth: What it guesses.
        events: The simulation's.
    """

    def __init__(self, facts: DrafterFacts, truth: GuessSource, events: Events) -> None:
        self._facts, self._truth, self._events = facts, truth, events
        pool = BlockPool(facts.kv_tokens // BLOCK_SIZE)
        # As in the engine: a quarter as many slots for tree nodes as for tokens.
        scratch = SlotPool(first_block=pool.num_blocks, num_blocks=max(1, pool.num_blocks // 4))
        self.scheduler: DraftScheduler[ScheduledDraftSession] = DraftScheduler(
            pool=pool,
            scratch=scratch,
            limits=facts.limits,
            vocab_size=STRIDE,
            context_len=CONTEXT_LEN,
            open_session=lambda opened: ScheduledDraftSession(opened, pool, context_len=CONTEXT_LEN),
        )

    def handle(self, messages: Sequence[ToDrafter], now_s: float, link: int = LINK) -> None:
        """Takes in a verifier's messages."""
        self.scheduler.handle(VerifierMessages(link=link, messages=messages), now_s)
        self.scheduler.moves.clear()

    def step(self, then: Callable[[DraftsByLink], None]) -> None:
        """Plans a step; when it ends, `then` gets its drafts."""
        plan = self.scheduler.plan(self._events.now_s)
        seconds = self.seconds(plan) * self._events.luck(self._facts.noise)

        def end() -> None:
            then(self.drafts(self.guesses(plan)))

        self._events.after(seconds, end)

    def seconds(self, plan: DraftPlan[ScheduledDraftSession]) -> float:
        """Expected time of a step."""
        computed = [*(part.session for part in plan.catching_up), *(each.session for each in plan.growing)]
        kv_tokens = sum(len(session.tokens) for session in {id(each): each for each in computed}.values())
        return self._facts.step_s(plan.num_rows, num_sessions=self.scheduler.num_sessions, kv_tokens=kv_tokens)

    def guesses(self, plan: DraftPlan[ScheduledDraftSession]) -> list[Offer]:
        """What the draft model finds in a step."""
        roots = [self._offer(part.session, ROOT, ()) for part in plan.catching_up if part.expands]
        return roots + [self._offer(each.session, each.slot, each.path) for each in plan.growing]

    def _offer(self, session: ScheduledDraftSession, slot: int, path: Sequence[int]) -> Offer:
        # Position 0 is the prompt's last token.
        position = len(session.tokens) + len(path) + 1 - session.prompt_len
        if any(token_id != RIGHT for token_id in path):
            # Some hundred places stand for all that lie off the text.
            place = self.scheduler.trees.node_id(session, slot)
            position = STRIDE * (1 + place % 8) + position % 32
        ranked = self._truth.guesses(int(session.session_id), position)[: self._facts.draft_width]
        return Offer(session, slot, *zip(*ranked, strict=True))

    def drafts(self, offers: Sequence[Offer]) -> DraftsByLink:
        """The step is over: what it has for verifiers."""
        self.scheduler.trees.grow(offers)
        self.scheduler.end_step()
        to_verifiers, _ = self.scheduler.take()
        return {
            link: drafts
            for link, messages in to_verifiers.items()
            if (drafts := [each for each in messages if isinstance(each, Drafts)])
        }


class DrafterProcess:
    """A drafter of the tier.

    Args:
        address: What verifiers know it by.
        profile: Facts.
        events: The simulation's.
    """

    def __init__(self, address: str, profile: Profile, events: Events) -> None:
        self.address = address
        self._drafter = SimulatedDrafter(profile.drafter, profile.truth, events)
        self._events = events
        self._link_s = profile.link_s
        self._verifiers: list[Verifier] = []
        self._num_sessions = 0
        self._inbox: list[tuple[int, Sequence[ToDrafter]]] = []
        self._busy = False

    def known(self) -> DrafterCandidate:
        """What verifiers know of it, without delay."""
        return DrafterCandidate(address=self.address, num_sessions=self._num_sessions)

    def count(self, change: int) -> None:
        """Drafts for so many sessions more from now on."""
        self._num_sessions += change

    def send(self, messages: Sequence[ToDrafter], verifier: Verifier) -> None:
        """A verifier sends messages."""
        if verifier not in self._verifiers:
            self._verifiers.append(verifier)
        link = self._verifiers.index(verifier)
        self._events.after(self._link_s, lambda: self._receive(link, messages))

    def _receive(self, link: int, messages: Sequence[ToDrafter]) -> None:
        self._inbox.append((link, messages))
        if not self._busy:
            self._go_on()

    def _go_on(self) -> None:
        inbox, self._inbox = self._inbox, []
        for link, messages in inbox:
            self._drafter.handle(messages, self._events.now_s, link)
        self._busy = self._drafter.scheduler.has_work
        if self._busy:
            self._drafter.step(self._end_step)

    def _end_step(self, drafts: DraftsByLink) -> None:
        for link, messages in drafts.items():
            self._events.after(self._link_s, partial(self._verifiers[link].receive, self.address, messages))
        self._go_on()
