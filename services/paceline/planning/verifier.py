"""A simulated verifier: the very scheduler of `core`, with steps that take as long as a profile says.

A verifier or drafter that is busy reads what has arrived when its step ends, as an engine's thread does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.core.acceptance_rules import Verdict
from paceline.core.draft_policy import Goodput
from paceline.core.drafter_tier import DrafterTier
from paceline.core.messages import Drafts, GenerateRequest
from paceline.core.moving_average import MovingAverage
from paceline.core.pages import BLOCK_SIZE, BlockPool, SlotPool
from paceline.core.pairing import Pairing
from paceline.core.params import DRAFT_MODEL, METHODS, SamplingParams, SpeculationParams
from paceline.core.planned_step import Part, StepPlan
from paceline.core.scheduled_session import ScheduledSession
from paceline.core.scheduler import Scheduler
from paceline.core.target_events import DraftsArrived, LinkChanged, TargetLimits
from paceline.core.tree import walk
from paceline.forest import NONE, Forest
from paceline.planning.drafter import LINK, DrafterProcess, DraftsByLink, SimulatedDrafter
from paceline.planning.events import Act, Events
from paceline.simulated.guesses import RIGHT, STRIDE
from paceline.simulated.profile import DeviceFacts, Profile

# Time of a co-located draft step before one was measured, and the weight of a new one; as in the engine.
FIRST_DRAFT_S, SMOOTHING = 1e-4, 0.1
# Address of a drafter inside a verifier.
INSIDE = "inside"


@dataclass(slots=True, kw_only=True)
class Request:
    """A request on its way through the fleet, and what became of it.

    Attributes:
        number: Which text it gets.
        num_steps, num_drafted, num_accepted: Of its decoding steps.
        pieces: When tokens came and how many, `(seconds, tokens)`.
    """

    number: int
    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    pieces: list[tuple[float, int]] = field(default_factory=list)
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def num_received(self) -> int:
        """Tokens that came."""
        return sum(count for _, count in self.pieces)


class SimulatedSession(ScheduledSession):
    """One session at its verifier; its text is `RIGHT` over and over.

    Args:
        asked: What is to be generated.
        drafter: Address of its drafter; empty: it decodes plainly.
        pool: Pages.
        forest: Where its tree is.
        calibration: Number of that of the drafter's guesses.
        now_s: The time.
        price: Of the last step.
    """

    def __init__(
        self,
        asked: Request,
        drafter: str,
        pool: BlockPool,
        forest: Forest,
        calibration: int,
        *,
        now_s: float,
        price: float,
    ) -> None:
        request = GenerateRequest(
            session_id=str(asked.number),
            epoch=1,
            prompt_token_ids=(RIGHT,) * asked.num_prompt_tokens,
            sampling=SamplingParams(max_tokens=asked.num_output_tokens, ignore_eos=True),
            speculation=SpeculationParams(enabled=bool(drafter)),
            # All texts are alike, and none has the pages of another.
            cache_salt=str(asked.number),
        )
        super().__init__(
            request,
            asked.number,
            pool,
            drafter_address=drafter,
            forest=forest,
            calibrations={DRAFT_MODEL: calibration},
            max_model_len=asked.num_prompt_tokens + asked.num_output_tokens,
            submitted_s=now_s,
            price=price,
        )
        self.asked = asked


class SimulatedVerifier:
    """A verifier whose sessions have drafters of the tier, one inside it, or none.

    Args:
        profile: Facts.
        events: The simulation's.
        colocated: Whether it drafts itself.
        drafters: Those of the tier.
        on_end: Called with every request that has all its tokens.
        policy: Picks what steps verify; None: as verifiers do, from a profile at start-up.
    """

    def __init__(
        self,
        profile: Profile,
        events: Events,
        *,
        colocated: bool,
        drafters: Sequence[DrafterProcess] = (),
        on_end: Callable[[Request], None],
        policy: Goodput | None = None,
    ) -> None:
        self._events, self._facts, self._on_end = events, profile.target, on_end
        self._inside = SimulatedDrafter(profile.colocated, profile.truth, events) if colocated else None
        self._inside_step = MovingAverage(FIRST_DRAFT_S, SMOOTHING)
        self._drafters = {drafter.address: drafter for drafter in drafters}
        self._pairing = Pairing()
        # A co-located drafter's time is its own, not a share of the verifier's.
        self._overhead = 0.0 if colocated else profile.drafting_overhead
        self.policy: Goodput = policy or Goodput(profile.target.starting_cost(), max_nodes=profile.most_nodes)
        self._pool = BlockPool(profile.target.kv_tokens // BLOCK_SIZE)
        self.scheduler = _scheduler(profile.target, self._pool, self.policy)
        addresses = (INSIDE,) if colocated else self._drafters
        self._calibrations = {address: self.scheduler.forest.new_calibration() for address in addresses}
        for address in self._calibrations:
            self.scheduler.change_link(LinkChanged(address=address, up=True), 0.0)
        self._inbox: list[Act] = []
        self._busy = False
        self._num_waits = 0

    def submit(self, asked: Request) -> None:
        """A request arrives, and is paired with a drafter if there is one."""
        self._pairing.know(each.known() for each in self._drafters.values())
        address = INSIDE if self._inside is not None else self._pairing.choose((DRAFT_MODEL,))
        if address in self._drafters:
            self._pairing.count(address, +1)
            self._drafters[address].count(1)
        self._post(lambda: self._open(asked, address))

    def _open(self, asked: Request, drafter: str) -> None:
        calibration = self._calibrations.get(drafter, NONE)
        now_s, price, forest = self._events.now_s, self.policy.price, self.scheduler.forest
        session = SimulatedSession(asked, drafter, self._pool, forest, calibration, now_s=now_s, price=price)
        self.scheduler.submit(session)

    def _ended(self, session: SimulatedSession) -> None:
        drafter = self._drafters.get(session.link.address)
        if drafter is not None:
            self._pairing.count(drafter.address, -1)
            drafter.count(-1)
        self._on_end(session.asked)

    def receive(self, address: str, messages: Sequence[Drafts]) -> None:
        """The messages of a drafter's step arrive."""
        arrived = DraftsArrived(address=address, messages=messages, arrived_s=self._events.now_s)
        self._post(lambda: self.scheduler.receive(arrived))

    def _send(self) -> None:
        """Sends drafters what the scheduler has for them."""
        self.scheduler.take_outcomes()
        to_drafters, _ = self.scheduler.tier.take()
        for address, messages in to_drafters.items():
            if self._inside is not None:
                self._inside.handle(messages, self._events.now_s)
            else:
                self._drafters[address].send(messages, self)

    def _post(self, act: Act) -> None:
        self._inbox.append(act)
        if not self._busy:
            self._drive()

    def _drive(self) -> None:
        """Handles what has arrived, then waits for drafts, drafts or steps, whichever is worth it."""
        self._busy = False
        inbox, self._inbox = self._inbox, []
        for act in inbox:
            act()
        if not self.scheduler.num_sessions:
            self._send()
            return
        self._num_waits += 1
        if self._inside is not None:
            self._busy = True
            self._draft_or_step(self._inside)
            return
        self.scheduler.mark_silent_drafters(self._events.now_s)
        wait_s = self.scheduler.patience_s(self._events.now_s)
        if wait_s > 0.0:
            self._events.after(wait_s, self._wake(self._num_waits))
        else:
            self._step()

    def _wake(self, number: int) -> Act:
        """Goes on after a wait, unless something ended the wait before."""

        def wake() -> None:
            if number == self._num_waits and not self._busy:
                self._drive()

        return wake

    def _draft_or_step(self, inside: SimulatedDrafter) -> None:
        now_s = self._events.now_s
        if not inside.scheduler.has_work or not self.scheduler.drafts_pay(self._inside_step.value, now_s):
            self._step()
            return

        def drafted(drafts: DraftsByLink) -> None:
            self._inside_step.add(self._events.now_s - now_s)
            messages = drafts.get(LINK, ())
            self.scheduler.receive(DraftsArrived(address=INSIDE, messages=messages, arrived_s=self._events.now_s))
            self._draft_or_step(inside)

        inside.step(drafted)

    def _step(self) -> None:
        """Plans a step; messages that are known before it runs go out while it does."""
        self._busy = True
        plan = self.scheduler.plan(self._events.now_s)
        self._send()
        self._events.after(self._seconds(plan) * self._events.luck(self._facts.noise), lambda: self._end_step(plan))

    def _seconds(self, plan: StepPlan[SimulatedSession]) -> float:
        """Expected time of a step."""
        kv_tokens = sum(part.session.committed_len for part in plan.decoding)
        seconds = self._facts.step_s(plan.num_rows, num_sessions=len(plan.parts), kv_tokens=kv_tokens)
        return seconds * (1.0 + self._overhead) if plan.drafters_work else seconds

    def _end_step(self, plan: StepPlan[SimulatedSession]) -> None:
        """Commits what the step verified."""
        judged = [(part, self._judge(part)) for part in plan.parts if part.commits]
        self.scheduler.commit(judged, batch_size=plan.batch_size, now_s=self._events.now_s)
        for part, verdict in judged:
            part.session.asked.pieces.append((self._events.now_s, len(verdict.token_ids)))
            if part.session.ended:
                self._ended(part.session)
        self.scheduler.moves.clear()
        self.scheduler.end_step(plan, self._events.now_s)
        self.scheduler.take_report(plan)
        self._send()
        self._drive()

    @staticmethod
    def _judge(part: Part[SimulatedSession]) -> Verdict:
        session, asked = part.session, part.session.asked
        tokens = walk(part.root, part.nodes, lambda _: RIGHT)
        if part.decodes:
            asked.num_steps += 1
            asked.num_drafted += len(part.nodes)
            asked.num_accepted += len(tokens) - 1
        for token_id in tokens:
            session.ends_with(token_id)
        return Verdict(token_ids=tokens)


def _scheduler(facts: DeviceFacts, pool: BlockPool, policy: Goodput) -> Scheduler[SimulatedSession]:
    return Scheduler(
        pool=pool,
        scratch=SlotPool(first_block=0, num_blocks=1 + facts.max_rows // BLOCK_SIZE),
        limits=TargetLimits(
            max_num_seqs=facts.max_sessions,
            max_num_batched_tokens=facts.max_rows,
            max_model_len=facts.kv_tokens,
        ),
        policy=policy,
        tier=DrafterTier(STRIDE, Forest(METHODS)),
    )
