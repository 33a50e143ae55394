"""vLLM's engine as the verifier's: sessions go in as its requests, its outputs come back as committed tokens.

vLLM computes in other processes, one step after another; whatever talks to them runs where the device of our engines
would, since it waits for the next step. If vLLM's engine dies, that call raises; if it hangs, it is seen as a device's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import InvalidRequestError, UnavailableError
from paceline.core.messages import NO_EVENT, GenerateResult, ModelIdentity, SessionEvent, StepCommit
from paceline.core.target_events import (
    Cancel,
    DrafterNews,
    SetMode,
    StepReport,
    Submit,
    TargetEvent,
    TargetOutput,
    TracedStart,
    TuningLoaded,
)
from paceline.engine.loop import Compute, inline
from paceline.service.learned import Learned
from paceline.verifier.vllm.helper_line import HelperLine
from paceline.verifier.vllm.results import (
    FINISH_REASONS,
    KV_USAGE,
    add_scheduler,
    position_logprobs,
    speculation_record,
    timings,
)
from paceline.verifier.vllm.sampling import check_under_vllm, counted_anew, vllm_sampling

# The latest statistics of vLLM's scheduler and of its iteration, until they are reported: at most one pair.
LastStats = deque[tuple[Any, Any]]


@dataclass(slots=True, kw_only=True)
class _VllmSession:
    """A session from its submission to its last token.

    Attributes:
        lossy: Whether vLLM's penalties ignore tokens that were generated elsewhere.
        num_generated: Its tokens so far, with those from elsewhere.
        num_steps: Steps that brought it tokens.
        sum_of_batches: Sessions that got tokens in these steps, summed over the steps.
    """

    submit: Submit
    submitted_s: float
    lossy: bool
    num_generated: int
    num_steps: int = 0
    sum_of_batches: int = 0

    @property
    def has_new_tokens(self) -> bool:
        return self.num_steps > 0


class VllmEngine:
    """Drives vLLM for a `TargetHost`.

    Args:
        core: vLLM's `LLMEngine`.
        make_params: Makes vLLM's `SamplingParams` of its fields.
        identity: Identity of the model.
        refusals: Errors with which vLLM refuses a request.
        helper: Decides on drafting; None: vLLM does not speculate.
        max_num_seqs: Most sessions that vLLM runs at once.
        stats: Statistics of vLLM's scheduler.
        clock: Seconds, the host's monotonic ones.
    """

    def __init__(
        self,
        *,
        core: Any,
        make_params: Callable[..., Any],
        refusals: tuple[type[Exception], ...] = (ValueError,),
        identity: ModelIdentity,
        helper: HelperLine | None,
        max_num_seqs: int,
        stats: LastStats,
        clock: Callable[[], float],
    ) -> None:
        self._core = core
        self._make_params = make_params
        self._refusals = refusals
        self._identity = identity
        self._helper = helper
        self._max_num_seqs = max_num_seqs
        self._stats = stats
        self._clock = clock
        # Sessions that vLLM has, by number.
        self._running: dict[int, _VllmSession] = {}
        self._events: list[TargetEvent] = []
        self._commit = StepCommit()
        self._kv_usage = 0.0
        # Whether sessions have gone since the last report.
        self._some_left = False

    def learned(self) -> Learned:
        """Returns nothing: the helper beside vLLM's worker learns of steps and drafts."""
        return {}

    @property
    def at_stake(self) -> tuple[int, ...]:
        """Numbers of the sessions that a failure now is blamed on."""
        return tuple(self._running)

    @property
    def full_step_s(self) -> float:
        """0: vLLM's steps are its own."""
        return 0.0

    def handle(self, event: TargetEvent) -> None:
        """Handles one event; those of drafters are ignored, and those of rehearsals are the helper's."""
        match event:
            case Submit() | Cancel():
                self._events.append(event)
            case SetMode() if self._helper is not None:
                self._helper.rehearse(event.drafts, over=bool(event.over))
            case TuningLoaded() if self._helper is not None:
                self._helper.teach(event.learned)

    def has_work(self) -> bool:
        """True when a step would do something."""
        return bool(self._events or self._running or self._some_left or not self._commit.is_empty)

    def patience_s(self) -> float:
        """0: vLLM waits for no drafts."""
        return 0.0

    async def step(self, compute: Compute = inline, tell: Callable[[DrafterNews], None] | None = None) -> TargetOutput:
        """Waits for vLLM's next outputs; refusals, and the sessions in the step, are sent before."""
        if self._events:
            await compute(self._take_in)
        if tell is not None and not self._commit.is_empty:
            tell(self._output(StepReport()))
        return await compute(self._step)

    def _take_in(self) -> None:
        events, self._events = self._events, []
        for event in events:
            match event:
                case Submit():
                    self._submit(event)
                case Cancel():
                    self._cancel(event.number)

    def _step(self) -> TargetOutput:
        report, began_s = StepReport(), self._clock()
        if self._core.has_unfinished_requests():
            outputs = [each for each in self._core.step() if int(each.request_id) in self._running]
            for output in outputs:
                self._take(output, len(outputs), report)
            self._add_stats(report)
            report.gammas += [0] * (len(outputs) - len(report.gammas))
            report.responded = self._helper is None or self._helper.responded
            report.num_rows = len(outputs) + sum(report.gammas) + report.num_prefill_rows
        report.seconds = self._clock() - began_s
        return self._output(report)

    def _submit(self, event: Submit) -> None:
        request = event.request
        try:
            check_under_vllm(request)
        except InvalidRequestError as error:
            self._commit.errors[event.number] = error
            return
        session = _VllmSession(
            submit=event,
            submitted_s=self._clock() if event.arrived_s is None else event.arrived_s,
            lossy=counted_anew(request),
            num_generated=len(request.committed_token_ids),
        )
        self._hand_over(session)

    def _hand_over(self, session: _VllmSession) -> None:
        request, number = session.submit.request, session.submit.number
        prompt = {"type": "token", "prompt_token_ids": [*request.prompt_token_ids, *request.committed_token_ids]}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        try:
            params = self._make_params(**vllm_sampling(request, self._identity.eos_token_ids))
            self._core.add_request(str(number), prompt, params)
        except self._refusals as error:
            # Some name the field.
            field = getattr(error, "parameter", None) or "request"
            self._commit.errors[number] = InvalidRequestError(field, str(error))
            return
        self._running[number] = session
        if len(self._running) <= self._max_num_seqs:
            self._commit.add_event(number, SessionEvent(running=True))

    def _cancel(self, number: int) -> None:
        if self._running.pop(number, None) is not None:
            self._core.abort_request([str(number)])
            self._some_left = True

    def _take(self, output: Any, batch_size: int, report: StepReport) -> None:
        """Adds the new tokens of one session."""
        number, answer = int(output.request_id), output.outputs[0]
        session = self._running[number]
        if answer.finish_reason is not None:
            del self._running[number]
            if answer.finish_reason not in FINISH_REASONS:
                problem = f"vLLM has ended the session: {answer.finish_reason}"
                self._commit.errors[number] = UnavailableError(problem)
                return
        elif not answer.token_ids:
            return
        if session.submit.request.traceparent and not session.has_new_tokens:
            report.traced.append(_start(session, output))
        self._commit.add(number, session.num_generated, answer.token_ids)
        session.num_generated += len(answer.token_ids)
        session.num_steps += 1
        session.sum_of_batches += batch_size
        if (event := _event(session, output)) != NO_EVENT:
            self._commit.add_event(number, event)

    def _add_stats(self, report: StepReport) -> None:
        if self._stats:
            add_scheduler(report, *self._stats.pop())
            self._kv_usage = report.levels[KV_USAGE]

    def _output(self, report: StepReport) -> TargetOutput:
        commit, self._commit = self._commit, StepCommit()
        self._some_left = False
        report.levels[KV_USAGE] = self._kv_usage if self._running else 0.0
        report.num_running = report.num_running or min(len(self._running), self._max_num_seqs)
        report.num_waiting = max(0, len(self._running) - report.num_running)
        return TargetOutput(commit=commit, to_drafters={}, broken_links={}, report=report)


def _event(session: _VllmSession, output: Any) -> SessionEvent:
    answer, count = output.outputs[0], session.submit.request.sampling.logprobs
    positions = () if count is None else zip(answer.token_ids, answer.logprobs, strict=True)
    return SessionEvent(
        logprobs=tuple(position_logprobs(token_id, known, count or 0) for token_id, known in positions),
        result=None if answer.finish_reason is None else _result(session, output),
        lossy=session.lossy,
    )


def _result(session: _VllmSession, output: Any) -> GenerateResult:
    answer, request = output.outputs[0], session.submit.request
    return GenerateResult(
        finish_reason=FINISH_REASONS[answer.finish_reason],
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=min(output.num_cached_tokens or 0, len(request.prompt_token_ids)),
        num_generated_tokens=session.num_generated - len(request.committed_token_ids),
        speculation=speculation_record(
            answer.spec_decode_metrics,
            num_steps=session.num_steps,
            mean_batch_size=session.sum_of_batches / max(1, session.num_steps),
            lossy=session.lossy,
        ),
        timings=timings(output.metrics, session.submitted_s),
    )


def _start(session: _VllmSession, output: Any) -> TracedStart:
    return TracedStart(
        number=session.submit.number,
        submitted_s=session.submitted_s,
        admitted_s=max(session.submitted_s, output.metrics.scheduled_ts),
        at_s=output.metrics.first_token_ts,
        num_cached_tokens=output.num_cached_tokens or 0,
    )
