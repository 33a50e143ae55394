"""Verifiers and drafters in simulated time: when they step, when they wait, and what they hear meanwhile.

A process that is busy hears what has arrived when its step ends, as the engine's thread does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.core.draft_policy import Goodput
from paceline.core.draft_scheduler import DraftPlan
from paceline.core.messages import DraftNodes, ToDrafter
from paceline.core.pairing import DrafterCandidate, Pairing
from paceline.core.params import DRAFT_MODEL
from paceline.core.planned_step import StepPlan
from paceline.core.scheduled_draft_session import ScheduledDraftSession
from paceline.core.step_time import KNOTS, StepCost, StepTimes
from paceline.planning.drafter import SimulatedDrafter
from paceline.planning.events import Act, Events
from paceline.planning.profile import DeviceFacts, DrafterFacts, Profile
from paceline.planning.verifier import Asked, SimulatedSession, SimulatedVerifier

# What a co-located draft step is taken to last before one was seen, and the weight of a new one; as in the engine.
FIRST_DRAFT_S, SMOOTHING = 1e-4, 0.1
# Address of a drafter inside a verifier.
OWN = "inside"


class DrafterProcess:
    """A drafter of the tier.

    Args:
        address: What verifiers know it by.
        profile: Facts.
        events: The simulation's.
    """

    def __init__(self, address: str, profile: Profile, events: Events) -> None:
        self.address = address
        self._facts = profile.drafter
        self._drafter = SimulatedDrafter(profile.drafter, profile.truth)
        self._events = events
        self._link_s = profile.link_s
        self._verifiers: dict[str, VerifierProcess] = {}
        self._inbox: list[ToDrafter] = []
        self._busy = False

    def known(self) -> DrafterCandidate:
        """What verifiers know of it, without delay."""
        return DrafterCandidate(address=self.address, num_sessions=len(self._verifiers))

    def pair(self, session_id: str, verifier: VerifierProcess) -> None:
        """Drafts for a session from now on."""
        self._verifiers[session_id] = verifier

    def part(self, session_id: str) -> None:
        """The session has ended."""
        del self._verifiers[session_id]

    def send(self, messages: Sequence[ToDrafter]) -> None:
        """A verifier sends messages."""
        self._events.after(self._link_s, lambda: self._hear(messages))

    def _hear(self, messages: Sequence[ToDrafter]) -> None:
        self._inbox += messages
        if not self._busy:
            self._go_on()

    def _go_on(self) -> None:
        inbox, self._inbox = self._inbox, []
        self._drafter.handle(inbox, self._events.now_s)
        self._busy = self._drafter.scheduler.has_work
        if self._busy:
            plan = self._drafter.scheduler.plan(self._events.now_s)
            seconds = self._drafter.seconds(plan) * self._events.luck(self._facts.device.noise)
            self._events.after(seconds, lambda: self._end_step(plan))

    def _end_step(self, plan: DraftPlan[ScheduledDraftSession]) -> None:
        said: dict[VerifierProcess, list[DraftNodes]] = {}
        for nodes in self._drafter.finish(plan):
            verifier = self._verifiers.get(nodes.session_id)
            if verifier is not None:
                said.setdefault(verifier, []).append(nodes)
        for verifier, messages in said.items():
            self._events.after(self._link_s, _received_by(verifier, self.address, messages))
        self._go_on()


class VerifierProcess:
    """A verifier whose sessions have drafters of the tier, one inside it, or none.

    Args:
        profile: Facts.
        events: The simulation's.
        colocated: Whether it drafts itself.
        drafters: Those of the tier.
        on_end: Told of every session that ends.
    """

    def __init__(
        self,
        profile: Profile,
        events: Events,
        *,
        colocated: bool,
        drafters: Sequence[DrafterProcess] = (),
        on_end: Callable[[SimulatedSession], None],
    ) -> None:
        self._events = events
        self._facts = profile.target
        self._own = _OwnDrafter(profile.colocated, profile, events) if colocated else None
        self._drafters = {drafter.address: drafter for drafter in drafters}
        self._pairing = Pairing()
        self._on_end = on_end
        policy = Goodput(max_nodes=profile.most_nodes)
        # A co-located drafter's time is its own, not a share of the verifier's.
        overhead = 0.0 if colocated else profile.drafting_overhead
        plain = starting_cost(profile.target)
        policy.times = StepTimes(plain, plain.scaled(1.0 + overhead))
        addresses = (OWN,) if colocated else tuple(self._drafters)
        self.verifier = SimulatedVerifier(
            profile.target, policy, overhead=overhead, drafters=addresses, on_end=self._ended
        )
        self._inbox: list[Act] = []
        self._busy = False
        self._num_waits = 0

    def submit(self, asked: Asked) -> None:
        """A request arrives, and is paired with a drafter if there is one."""
        self._pairing.know(each.known() for each in self._drafters.values())
        address = OWN if self._own is not None else self._pairing.choose((DRAFT_MODEL,))
        if address in self._drafters:
            self._pairing.count(address, +1)
            self._drafters[address].pair(str(asked.number), self)
        self._post(lambda: self.verifier.submit(asked, address, self._events.now_s))

    def _ended(self, session: SimulatedSession) -> None:
        drafter = self._drafters.get(session.link.address)
        if drafter is not None:
            self._pairing.count(drafter.address, -1)
            drafter.part(session.session_id)
        self._on_end(session)

    def receive(self, address: str, messages: Sequence[DraftNodes]) -> None:
        """What a drafter's step had to say arrives."""
        arrived_s = self._events.now_s
        self._post(lambda: self.verifier.receive(address, messages, arrived_s))

    def _say(self) -> None:
        for address, messages in self.verifier.take().items():
            if self._own is not None:
                self._own.drafter.handle(messages, self._events.now_s)
            else:
                self._drafters[address].send(messages)

    def _post(self, act: Act) -> None:
        self._inbox.append(act)
        if not self._busy:
            self._drive()

    def _drive(self) -> None:
        """Handles what has arrived, then waits for drafts, drafts or steps, whatever is worth it."""
        self._busy = False
        inbox, self._inbox = self._inbox, []
        for act in inbox:
            act()
        if not self.verifier.scheduler.num_sessions:
            self._say()
            return
        self._num_waits += 1
        if self._own is not None:
            self._busy = True
            self._draft_or_step(self._own)
            return
        wait_s = self.verifier.patience_s(self._events.now_s)
        if wait_s > 0.0:
            self._events.after(wait_s, self._wake(self._num_waits))
        else:
            self._step()

    def _wake(self, number: int) -> Act:
        """Goes on after a wait, unless something came that ended it before."""

        def wake() -> None:
            if number == self._num_waits and not self._busy:
                self._drive()

        return wake

    def _draft_or_step(self, own: _OwnDrafter) -> None:
        now_s = self._events.now_s
        if not own.drafter.scheduler.has_work or not self.verifier.scheduler.drafts_pay(own.draft_s, now_s):
            self._step()
            return

        plan = own.drafter.scheduler.plan(now_s)

        def drafted() -> None:
            own.took(self._events.now_s - now_s)
            self.verifier.receive(OWN, own.drafter.finish(plan), self._events.now_s)
            self._draft_or_step(own)

        self._events.after(own.seconds(plan), drafted)

    def _step(self) -> None:
        """Plans a step; what is known before it runs goes out while it does."""
        self._busy = True
        plan = self.verifier.scheduler.plan(self._events.now_s)
        self._say()
        seconds = self.verifier.seconds(plan) * self._events.luck(self._facts.noise)
        self._events.after(seconds, lambda: self._end_step(plan))

    def _end_step(self, plan: StepPlan[SimulatedSession]) -> None:
        self.verifier.finish(plan, self._events.now_s)
        self._say()
        self._drive()


class _OwnDrafter:
    """A drafter inside a verifier: its steps and the verifier's take turns."""

    def __init__(self, facts: DrafterFacts, profile: Profile, events: Events) -> None:
        self.drafter = SimulatedDrafter(facts, profile.truth)
        self.draft_s = FIRST_DRAFT_S
        self._facts = facts
        self._events = events

    def seconds(self, plan: DraftPlan[ScheduledDraftSession]) -> float:
        """Time of a draft step."""
        return self.drafter.seconds(plan) * self._events.luck(self._facts.device.noise)

    def took(self, seconds: float) -> None:
        """A draft step took so long."""
        self.draft_s += SMOOTHING * (seconds - self.draft_s)


def starting_cost(facts: DeviceFacts) -> StepCost:
    """What a start-up profile would say: steps of so many rows of a session each, without KV."""
    rows = tuple(count for count in KNOTS if count <= max(4, facts.max_rows))
    return StepCost(rows=rows, seconds=tuple(facts.seconds(count, num_sessions=1) for count in rows))


def _received_by(verifier: VerifierProcess, address: str, messages: Sequence[DraftNodes]) -> Act:
    return lambda: verifier.receive(address, messages)
