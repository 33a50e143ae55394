"""A drafter inside the verifier: the same two engines on one device, and a link that carries messages at once.

It is there for comparison, and for machines that have no second place for a drafter. Drafting delays verifying here, so
it goes on only while waiting for drafts pays (`StepDrafts.worth_waiting`): a draft step is a wait that works.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.core.goodput import MovingAverage
from paceline.core.target_events import DrafterNews, DraftsArrived, LinkChanged, TargetEvent, TargetOutput
from paceline.engine.draft_scheduler import VerifierMessages
from paceline.engine.drafter import DraftEngine
from paceline.engine.loop import Compute, inline
from paceline.engine.target import TargetEngine
from paceline.service.learned import Learned

# Stands for the drafter's address; no drafter of the tier can have it.
LOCAL = "in this verifier"
_LINK = 0
# Assumed time of a level of guesses before the first is measured, and the weight of a new measurement.
FIRST_DRAFT_S, SMOOTHING = 1e-4, 0.1


class ColocatedEngine:
    """A target engine and a draft engine that take turns.

    Args:
        wants_states: Whether it drafts from hidden states.
        clock: Seconds, monotonic.
        draft_model: Name of its model, for metrics.
    """

    def __init__(
        self,
        target: TargetEngine,
        draft: DraftEngine,
        *,
        wants_states: bool,
        clock: Callable[[], float],
        draft_model: str = "",
    ) -> None:
        self._target = target
        self._draft = draft
        self._clock = clock
        self._draft_level = MovingAverage(FIRST_DRAFT_S, SMOOTHING)
        self._draft_model, self._drafted_s = draft_model, 0.0
        target.handle(LinkChanged(address=LOCAL, up=True, wants_states=wants_states, draft_model=draft_model))

    def handle(self, event: TargetEvent) -> None:
        self._target.handle(event)

    def has_work(self) -> bool:
        """Whether the target has work; the drafter alone has nothing to do."""
        return self._target.has_work()

    def patience_s(self) -> float:
        """0: drafts come while a step runs, never between two."""
        return 0.0

    def learned(self) -> Learned:
        """Learned tuning for a successor."""
        return self._target.learned()

    @property
    def at_stake(self) -> tuple[int, ...]:
        """Numbers of the sessions that a failure now is attributed to."""
        return self._target.at_stake

    @property
    def full_step_s(self) -> float:
        """Expected seconds of a step of all sessions that fit."""
        return self._target.full_step_s

    async def step(self, compute: Compute = inline, tell: Callable[[DrafterNews], None] | None = None) -> TargetOutput:
        """Drafts as long as that pays, then runs a step of the target; see `TargetEngine`."""

        def hand_on(news: DrafterNews) -> None:
            self._hand_on(news)
            for_clients = isinstance(news, TargetOutput) and not news.commit.is_empty
            if tell is not None and (news.to_drafters or news.broken_links or for_clients):
                tell(news)

        while self._draft.has_work() and self._target.drafts_pay(self._draft_level.value):
            await self._draft_once(compute)
        output = await self._target.step(compute, None if tell is None else hand_on)
        self._hand_on(output)
        output.report.count("paceline:draft_seconds", self._draft_model, LOCAL, by=self._drafted_s)
        self._drafted_s = 0.0
        return output

    def _hand_on(self, news: DrafterNews) -> None:
        messages = news.to_drafters.pop(LOCAL, None)
        if messages:
            self._draft.handle(VerifierMessages(link=_LINK, messages=messages))

    async def _draft_once(self, compute: Compute) -> None:
        started_s, output = self._clock(), await self._draft.step(compute)
        for messages in output.to_verifiers.values():
            self._target.handle(DraftsArrived(address=LOCAL, messages=messages, arrived_s=self._clock()))
        self._drafted_s += sum(output.device_s.values())
        self._draft_level.add((self._clock() - started_s) / output.report.num_levels)
