"""A simulated verifier: the very scheduler of `core`, with steps that take what a profile says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.core.acceptance_rules import Verdict
from paceline.core.calibration import Calibration, Calibrations
from paceline.core.draft_policy import DraftPolicy
from paceline.core.drafter_tier import DrafterTier
from paceline.core.messages import DraftNodes, GenerateRequest, ToDrafter
from paceline.core.pages import BLOCK_SIZE, BlockPool, SlotPool
from paceline.core.params import DRAFT_MODEL, SamplingParams, SpeculationParams
from paceline.core.planned_step import Part, StepPlan
from paceline.core.scheduled_session import ScheduledSession
from paceline.core.scheduler import Scheduler
from paceline.core.step_time import StepMode
from paceline.core.target_events import DraftsArrived, LinkChanged, TargetLimits
from paceline.core.tree import Node, walk
from paceline.planning.guesses import RIGHT, STRIDE
from paceline.planning.profile import DeviceFacts


@dataclass(slots=True, kw_only=True)
class Asked:
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
        calibration: Of the drafter's guesses.
        now_s: The time.
        price: Of the last step.
    """

    def __init__(
        self, asked: Asked, drafter: str, pool: BlockPool, calibration: Calibration, *, now_s: float, price: float
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
            calibrations=Calibrations({DRAFT_MODEL: calibration}),
            max_model_len=asked.num_prompt_tokens + asked.num_output_tokens,
            submitted_s=now_s,
            price=price,
        )
        self.asked = asked


class SimulatedVerifier:
    """Runs the scheduler's steps in simulated time.

    Args:
        facts: Of the target on its device.
        policy: The policy of `core` that picks nodes and sets the price.
        overhead: Share by which steps take longer while drafters work.
        drafters: Addresses of those that are up.
        on_end: Told of every session that has all its tokens.
    """

    def __init__(
        self,
        facts: DeviceFacts,
        policy: DraftPolicy,
        *,
        overhead: float,
        drafters: tuple[str, ...],
        on_end: Callable[[SimulatedSession], None],
    ) -> None:
        self.policy = policy
        self._on_end = on_end
        self._facts = facts
        self._overhead = overhead
        self._pool = BlockPool(facts.kv_tokens // BLOCK_SIZE)
        limits = TargetLimits(
            max_num_seqs=facts.max_sessions,
            max_num_batched_tokens=facts.max_rows,
            max_model_len=facts.kv_tokens,
        )
        self.scheduler: Scheduler[SimulatedSession] = Scheduler(
            pool=self._pool,
            scratch=SlotPool(first_block=0, num_blocks=1 + facts.max_rows // BLOCK_SIZE),
            limits=limits,
            policy=policy,
            tier=DrafterTier(STRIDE),
        )
        self._calibrations = {address: Calibration() for address in drafters}
        for address in drafters:
            self.scheduler.change_link(LinkChanged(address=address, up=True), 0.0)

    def submit(self, asked: Asked, drafter: str, now_s: float) -> None:
        """A request arrives, with the address of its drafter, if it has one."""
        calibration = self._calibrations[drafter] if drafter else Calibration()
        price = self.policy.price
        self.scheduler.submit(SimulatedSession(asked, drafter, self._pool, calibration, now_s=now_s, price=price))

    def receive(self, address: str, messages: Sequence[DraftNodes], arrived_s: float) -> None:
        """Takes in what a drafter said."""
        self.scheduler.receive(DraftsArrived(address=address, messages=messages, arrived_s=arrived_s))

    def take(self) -> dict[str, list[ToDrafter]]:
        """What is to be said to drafters, by their addresses."""
        self.scheduler.take_outcomes()
        to_drafters, _ = self.scheduler.tier.take()
        return to_drafters

    def patience_s(self, now_s: float) -> float:
        """See `Scheduler.patience_s`."""
        self.scheduler.mark_silent_drafters(now_s)
        return self.scheduler.patience_s(now_s)

    def seconds(self, plan: StepPlan[SimulatedSession]) -> float:
        """Expected time of a step."""
        kv_tokens = sum(part.session.committed_len for part in plan.decoding)
        seconds = self._facts.seconds(plan.num_rows, num_sessions=len(plan.parts), kv_tokens=kv_tokens)
        return seconds * (1.0 + self._overhead) if plan.mode is StepMode.DRAFTING else seconds

    def finish(self, plan: StepPlan[SimulatedSession], now_s: float) -> None:
        """Ends a step: commits what it verified."""
        batch_size = plan.batch_size
        for part in plan.parts:
            if part.commits:
                self._commit(part, batch_size, now_s)
        self.scheduler.moves.clear()
        self.scheduler.end_step(plan, now_s)
        self.scheduler.take_report(plan)

    def _commit(self, part: Part[SimulatedSession], batch_size: int, now_s: float) -> None:
        session, asked = part.session, part.session.asked
        tokens = walk(session.tree.root, part.nodes, _choose)
        if session.is_decoding:
            asked.num_steps += 1
            asked.num_drafted += len(part.nodes)
            asked.num_accepted += len(tokens) - 1
        for token_id in tokens:
            session.ends_with(token_id)
        self.scheduler.commit(part, Verdict(token_ids=tokens), batch_size=batch_size, now_s=now_s)
        asked.pieces.append((now_s, len(tokens)))
        if session.ended:
            self._on_end(session)


def _choose(_: Node) -> int:
    return RIGHT
