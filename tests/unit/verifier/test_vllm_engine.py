"""Sessions under vLLM, told over a script in place of its engine; its answers are plain data."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.core.errors import InvalidRequestError, UnavailableError
from paceline.core.messages import FinishReason, GenerateRequest, ModelIdentity, PositionLogprobs
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.target_events import Cancel, DrafterNews, SetMode, Submit, TargetOutput, TuningLoaded
from paceline.engine.loop import run_sync
from paceline.verifier.vllm.engine import LastStats, VllmEngine
from paceline.verifier.vllm.helper_line import HelperLine
from tests.support.clock import Clock
from tests.support.steps import Step, steps_of

IDENTITY = ModelIdentity(name="m", vocab_hash="v", vocab_size=64, context_len=100, eos_token_ids=(7,))


class Script:
    """Stands for `LLMEngine`: takes requests, and answers what it was given to answer."""

    def __init__(self) -> None:
        self.requests: dict[str, tuple[Any, Any]] = {}
        self.aborted: list[str] = []
        self.answers: deque[list[Any]] = deque()
        self.refusal: Exception | None = None

    def add_request(self, request_id: str, prompt: Any, params: Any) -> str:
        if self.refusal is not None:
            raise self.refusal
        self.requests[request_id] = (prompt, params)
        return request_id

    def abort_request(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    def has_unfinished_requests(self) -> bool:
        return bool(self.answers)

    def step(self) -> list[Any]:
        return self.answers.popleft()


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def stats() -> LastStats:
    return LastStats(maxlen=1)


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


class HelperSpy(HelperLine):
    """Notes what it is to tell the helper."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.told: list[Any] = []

    def rehearse(self, drafts: bool | None, *, over: bool = False) -> None:
        self.told.append((drafts, over))

    def teach(self, learned: bytes) -> None:
        self.told.append(learned)


@pytest.fixture
def helper() -> HelperSpy:
    return HelperSpy()


@pytest.fixture
def engine(script: Script, stats: LastStats, clock: Clock, helper: HelperSpy) -> VllmEngine:
    return VllmEngine(
        core=script,
        make_params=dict,
        identity=IDENTITY,
        helper=helper,
        max_num_seqs=2,
        stats=stats,
        clock=clock,
    )


def submit(engine: VllmEngine, number: int, committed: tuple[int, ...] = (), **more: Any) -> None:
    sampling = more.pop("sampling", SamplingParams(max_tokens=10, temperature=0.0))
    request = GenerateRequest(
        session_id=f"s{number}",
        epoch=0,
        prompt_token_ids=(1, 2),
        committed_token_ids=committed,
        sampling=sampling,
        speculation=SpeculationParams(),
        **more,
    )
    engine.handle(Submit(request=request, number=number, arrived_s=99.0))


def answer(number: int, *token_ids: int, reason: str | None = None, logprobs: Any = None, counts: Any = None) -> Any:
    return SimpleNamespace(
        request_id=str(number),
        num_cached_tokens=1,
        metrics=SimpleNamespace(scheduled_ts=99.5, first_token_ts=101.0, last_token_ts=103.0),
        outputs=[
            SimpleNamespace(
                token_ids=list(token_ids), finish_reason=reason, logprobs=logprobs, spec_decode_metrics=counts
            )
        ],
    )


def outcomes(output: TargetOutput | None) -> dict[int, Any]:
    assert output is not None
    return {**dict(steps_of(output.commit)), **output.commit.errors}


def told_before(engine: VllmEngine) -> TargetOutput:
    """What is told before a step, in which nothing happens."""
    told: list[DrafterNews] = []
    run_sync(engine.step(tell=told.append))
    (output,) = told
    assert isinstance(output, TargetOutput)
    return output


def begun(engine: VllmEngine) -> dict[int, Any]:
    return outcomes(told_before(engine))


def test_tokens_come_out_as_they_are_generated_and_the_last_ones_with_the_result(
    engine: VllmEngine, script: Script
) -> None:
    submit(engine, 1)
    assert begun(engine) == {1: Step(running=True)}
    counts = SimpleNamespace(histogram=[1, 0, 2, 0], num_draft_tokens=6)
    script.answers.extend([[answer(1, 5, 6)], [answer(1, 7, reason="stop", counts=counts)]])
    assert outcomes(run_sync(engine.step())) == {1: Step((5, 6), bytes(2))}
    last = outcomes(run_sync(engine.step()))[1]
    assert (last.token_ids, last.offset) == ((7,), 2)
    assert last.result.finish_reason is FinishReason.STOP
    assert (last.result.num_prompt_tokens, last.result.num_cached_tokens, last.result.num_generated_tokens) == (2, 1, 3)
    record = last.result.speculation
    assert (record.num_steps, record.num_spec_steps, record.num_draft_tokens) == (2, 3, 6)
    assert (record.num_accepted_draft_tokens, record.acceptance_histogram) == (4, (1, 0, 2))
    assert record.distribution_only
    assert not record.lossy
    assert (last.result.timings.queue_ns, last.result.timings.prefill_ns) == (500_000_000, 1_500_000_000)
    assert last.result.timings.decode_ns == 2_000_000_000
    assert not engine.has_work()


def test_a_session_that_moved_here_goes_on_behind_its_committed_tokens(engine: VllmEngine, script: Script) -> None:
    submit(engine, 1, committed=(3, 4), cache_salt="mine")
    begun(engine)
    prompt, params = script.requests["1"]
    assert prompt == {"type": "token", "prompt_token_ids": [1, 2, 3, 4], "cache_salt": "mine"}
    assert params["max_tokens"] == 8
    script.answers.append([answer(1, 5, reason="length")])
    committed = outcomes(run_sync(engine.step()))[1]
    assert committed.offset == 2
    assert committed.result.num_generated_tokens == 1


def test_a_session_whose_penalties_forget_says_that_its_law_is_another(engine: VllmEngine, script: Script) -> None:
    submit(engine, 1, committed=(3,), sampling=SamplingParams(max_tokens=9, presence_penalty=1.0))
    begun(engine)
    script.answers.append([answer(1, 5, reason="length")])
    committed = outcomes(run_sync(engine.step()))[1]
    assert committed.lossy
    assert committed.result.speculation.lossy


def test_log_probabilities_are_those_of_the_chosen_token_and_of_the_best_ones(
    engine: VllmEngine, script: Script
) -> None:
    submit(engine, 1, sampling=SamplingParams(max_tokens=9, temperature=0.0, logprobs=2))
    begun(engine)
    entry = SimpleNamespace
    beside = {5: entry(logprob=-3.0, rank=4), 8: entry(logprob=-0.1, rank=1), 9: entry(logprob=-2.0, rank=2)}
    among = {9: entry(logprob=-2.0, rank=2), 8: entry(logprob=-0.1, rank=1)}
    script.answers.append([answer(1, 5, 9, logprobs=[beside, among])])
    top = ((8, -0.1), (9, -2.0))
    assert outcomes(run_sync(engine.step()))[1].logprobs == (
        PositionLogprobs(token_id=5, logprob=-3.0, top=top),
        PositionLogprobs(token_id=9, logprob=-2.0, top=top),
    )


def test_a_session_whose_client_left_is_ended_and_not_heard_of_again(engine: VllmEngine, script: Script) -> None:
    submit(engine, 1)
    begun(engine)
    script.answers.append([answer(1, 5)])
    for _ in range(2):
        engine.handle(Cancel(number=1))
        assert outcomes(run_sync(engine.step())) == {}
        assert script.aborted == ["1"]


def test_reports_do_not_go_on_telling_of_sessions_that_have_left(engine: VllmEngine) -> None:
    submit(engine, 1)
    assert told_before(engine).report.num_running == 1
    engine.handle(Cancel(number=1))
    assert engine.has_work()
    assert run_sync(engine.step()).report.num_running == 0
    assert not engine.has_work()


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_session_that_vllm_gives_up_goes_on_elsewhere(engine: VllmEngine, script: Script, reason: str) -> None:
    submit(engine, 1)
    begun(engine)
    script.answers.append([answer(1, reason=reason)])
    assert isinstance(outcomes(run_sync(engine.step()))[1], UnavailableError)
    assert not engine.has_work()


def test_a_refused_request_hears_so_before_the_next_step(engine: VllmEngine, script: Script) -> None:
    submit(engine, 1, sampling=SamplingParams(max_tokens=9, temperature=0.001))
    script.refusal = ValueError("too much of it")
    submit(engine, 2)
    refused = begun(engine)
    assert isinstance(refused[1], InvalidRequestError)
    assert str(refused[1]).startswith("temperature:")
    assert str(refused[2]) == "request: too much of it"


def test_a_dead_engine_is_not_taken_for_a_refusal(engine: VllmEngine, script: Script) -> None:
    script.refusal = RuntimeError("dead")
    submit(engine, 1)
    with pytest.raises(RuntimeError, match="dead"):
        run_sync(engine.step())


def test_only_sessions_that_have_a_place_say_that_they_run(engine: VllmEngine) -> None:
    for number in (1, 2, 3):
        submit(engine, number)
    assert set(begun(engine)) == {1, 2}


def test_the_engines_death_is_laid_on_all_sessions_that_vllm_has(engine: VllmEngine) -> None:
    submit(engine, 1)
    submit(engine, 2)
    engine.handle(Cancel(number=1))
    begun(engine)
    assert engine.at_stake == (2,)


def test_a_report_tells_what_the_scheduler_did(engine: VllmEngine, script: Script, stats: LastStats) -> None:
    submit(engine, 1)
    begun(engine)
    script.answers.append([answer(1, 5)])
    drafted = SimpleNamespace(num_drafts=2, num_draft_tokens_per_pos=[2, 2, 1], num_accepted_tokens_per_pos=[1, 0, 0])
    cache = SimpleNamespace(queries=8, hits=3)
    scheduler = SimpleNamespace(
        num_running_reqs=1,
        num_waiting_reqs=0,
        num_skipped_waiting_reqs=0,
        kv_cache_usage=0.25,
        prefix_cache_stats=cache,
        spec_decoding_stats=drafted,
    )
    stats.append((scheduler, SimpleNamespace(num_preempted_reqs=1, num_prompt_tokens=4)))
    report = run_sync(engine.step()).report
    assert (report.gammas, report.accepted) == ([3, 2], [1, 0])
    assert report.levels == {"vllm:kv_cache_usage_perc": 0.25}
    names = ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions")
    assert [report.counts[name,] for name in names] == [8, 3, 1]
    assert report.num_rows == 1 + 5 + 4


def test_in_a_rehearsal_the_helper_decides_and_says_whether_drafters_answered(
    engine: VllmEngine, script: Script, helper: HelperSpy
) -> None:
    engine.handle(SetMode(drafts=True))
    engine.handle(SetMode(drafts=None, over="draft"))
    engine.handle(TuningLoaded(learned=b"{}"))
    assert helper.told == [(True, False), (None, True), b"{}"]
    assert not engine.has_work()
    submit(engine, 1)
    submit(engine, 2)
    script.answers.extend([[answer(1, 5), answer(2, 6)]] * 2)
    report = run_sync(engine.step()).report
    assert (report.gammas, report.responded) == ([0, 0], True)
    helper.responded = False
    assert not run_sync(engine.step()).report.responded
