"""vLLM's engine as the verifier's: sessions go in as its requests, its outputs come back as committed tokens.

It runs in the engine thread. vLLM computes in other processes, one step after another; `step` waits for the next one.
If its engine dies, the call here raises; if it hangs, the watch on the engine thread sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import InvalidRequestError, UnavailableError
from paceline.core.messages import CommittedTokens, GenerateResult, ModelIdentity
from paceline.core.target_events import (
    Cancel,
    DrafterNews,
    Outcome,
    StepReport,
    Submit,
    TargetEvent,
    TargetOutput,
    TracedStart,
)
from paceline.service.learned import Learned
from paceline.verifier.vllm.results import (
    FINISH_REASONS,
    add_scheduler,
    position_logprobs,
    speculation_record,
    timings,
)
from paceline.verifier.vllm.sampling import check_under_vllm, counted_anew, vllm_sampling


class LastStats:
    """The latest statistics of vLLM's scheduler."""

    def __init__(self) -> None:
        self._latest: tuple[Any, Any] | None = None

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Adds the statistics of a step."""
        if scheduler is not None:
            self._latest = scheduler, iteration

    def take(self) -> tuple[Any, Any] | None:
        """Returns those that came since the last call."""
        latest, self._latest = self._latest, None
        return latest


@dataclass(slots=True, kw_only=True)
class _Session:
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
        identity: Of the model.
        refusals: Errors with which vLLM refuses a request.
        drafts: Whether vLLM speculates.
        max_num_seqs: Most sessions that vLLM runs at once.
        stats: Of vLLM's scheduler.
        clock: Seconds, the host's monotonic ones.
    """

    def __init__(
        self,
        *,
        core: Any,
        make_params: Callable[..., Any],
        refusals: tuple[type[Exception], ...] = (ValueError,),
        identity: ModelIdentity,
        drafts: bool,
        max_num_seqs: int,
        stats: LastStats,
        clock: Callable[[], float],
    ) -> None:
        self._core = core
        self._make_params = make_params
        self._refusals = refusals
        self._identity = identity
        self._drafts = drafts
        self._max_num_seqs = max_num_seqs
        self._stats = stats
        self._clock = clock
        # Sessions that vLLM has, by serial.
        self._running: dict[int, _Session] = {}
        self._outcomes: list[Outcome] = []
        self._kv_usage = 0.0
        # Whether sessions have gone since the last report.
        self._some_left = False

    def learned(self) -> Learned:
        """Returns nothing: the helper beside vLLM's worker learns of steps and drafts."""
        return {}

    @property
    def at_stake(self) -> tuple[int, ...]:
        """Serials of the sessions that a failure now is blamed on."""
        return tuple(self._running)

    def handle(self, event: TargetEvent) -> None:
        """Handles one event; those of drafters are ignored."""
        match event:
            case Submit():
                self._submit(event)
            case Cancel():
                self._cancel(event.serial)
            case _:
                pass

    def has_work(self) -> bool:
        """True when a step would do something."""
        return bool(self._running or self._outcomes or self._some_left)

    def patience_s(self) -> float:
        """None: vLLM waits for no drafts."""
        return 0.0

    def begin(self) -> TargetOutput | None:
        """Reports what need not wait for the step: refusals, and which sessions run in it."""
        return self._output(StepReport()) if self._outcomes else None

    def step(self, tell: Callable[[DrafterNews], None] | None = None) -> TargetOutput:
        """Waits for vLLM's next outputs."""
        report, began_s = StepReport(), self._clock()
        if self._core.has_unfinished_requests():
            outputs = [each for each in self._core.step() if int(each.request_id) in self._running]
            for output in outputs:
                self._take(output, len(outputs), report)
            self._add_stats(report)
            report.num_rows = len(outputs) + sum(report.gammas) + report.num_prefill_rows
        report.seconds = self._clock() - began_s
        return self._output(report)

    def _submit(self, event: Submit) -> None:
        request = event.request
        try:
            check_under_vllm(request, drafts=self._drafts)
        except InvalidRequestError as error:
            self._outcomes.append((event.serial, error))
            return
        session = _Session(
            submit=event,
            submitted_s=self._clock() if event.arrived_s is None else event.arrived_s,
            lossy=counted_anew(request),
            num_generated=len(request.committed_token_ids),
        )
        self._hand_over(session)

    def _hand_over(self, session: _Session) -> None:
        request, serial = session.submit.request, session.submit.serial
        prompt = {"type": "token", "prompt_token_ids": [*request.prompt_token_ids, *request.committed_token_ids]}
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        try:
            params = self._make_params(**vllm_sampling(request, self._identity.eos_token_ids))
            self._core.add_request(str(serial), prompt, params)
        except self._refusals as error:
            # Some name the field.
            field = getattr(error, "parameter", None) or "request"
            self._outcomes.append((serial, InvalidRequestError(field, str(error))))
            return
        self._running[serial] = session
        if len(self._running) <= self._max_num_seqs:
            self._outcomes.append((serial, _runs(session)))

    def _cancel(self, serial: int) -> None:
        if self._running.pop(serial, None) is not None:
            self._core.abort_request([str(serial)])
            self._some_left = True

    def _take(self, output: Any, batch_size: int, report: StepReport) -> None:
        """Adds the new tokens of one session."""
        serial, answer = int(output.request_id), output.outputs[0]
        session = self._running[serial]
        if answer.finish_reason is not None:
            del self._running[serial]
            if answer.finish_reason not in FINISH_REASONS:
                error = UnavailableError(f"vLLM has ended the session: {answer.finish_reason}")
                self._outcomes.append((serial, error))
                return
        elif not answer.token_ids:
            return
        if session.submit.request.traceparent and not session.has_new_tokens:
            report.traced.append(_start(session, output))
        offset = session.num_generated
        session.num_generated += len(answer.token_ids)
        session.num_steps += 1
        session.sum_of_batches += batch_size
        self._outcomes.append((serial, _committed(session, output, offset)))

    def _add_stats(self, report: StepReport) -> None:
        stats = self._stats.take()
        if stats is not None:
            add_scheduler(report, *stats)
            self._kv_usage = report.kv_usage

    def _output(self, report: StepReport) -> TargetOutput:
        outcomes, self._outcomes = self._outcomes, []
        self._some_left = False
        report.kv_usage = self._kv_usage if self._running else 0.0
        report.num_running = report.num_running or min(len(self._running), self._max_num_seqs)
        report.num_waiting = max(0, len(self._running) - report.num_running)
        return TargetOutput(committed=outcomes, to_drafters={}, broken_links={}, report=report)


def _runs(session: _Session) -> CommittedTokens:
    return CommittedTokens(token_ids=(), offset=session.num_generated, running=True)


def _committed(session: _Session, output: Any, offset: int) -> CommittedTokens:
    answer, count = output.outputs[0], session.submit.request.sampling.logprobs
    positions = () if count is None else zip(answer.token_ids, answer.logprobs, strict=True)
    return CommittedTokens(
        token_ids=tuple(answer.token_ids),
        offset=offset,
        logprobs=tuple(position_logprobs(token_id, known, count or 0) for token_id, known in positions),
        result=None if answer.finish_reason is None else _result(session, output),
        lossy=session.lossy,
    )


def _result(session: _Session, output: Any) -> GenerateResult:
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


def _start(session: _Session, output: Any) -> TracedStart:
    return TracedStart(
        serial=session.submit.serial,
        submitted_s=session.submitted_s,
        admitted_s=max(session.submitted_s, output.metrics.scheduled_ts),
        at_s=output.metrics.first_token_ts,
        num_cached_tokens=output.num_cached_tokens or 0,
    )
