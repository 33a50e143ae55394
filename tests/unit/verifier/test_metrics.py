"""Step reports become metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from paceline.core.errors import UnavailableError
from paceline.core.messages import FinishReason, GenerateResult, SessionEvent, StepCommit, Timings
from paceline.core.target_events import StepReport, TargetOutput
from paceline.obs.metrics import VerifierMetrics

MODEL = {"model_name": "tiny"}


def test_a_step_counts_in_metrics_by_their_names():
    registry = CollectorRegistry()
    metrics = VerifierMetrics(registry, "tiny")
    for seconds in (0.25, 0.5):
        report = StepReport(num_rows=4, levels={"vllm:kv_cache_usage_perc": seconds})
        report.count("paceline:source_turns", "medusa", by=3)
        report.count("paceline:round_hits")
        report.sample("paceline:draft_round_trip_seconds", seconds, seconds)
        metrics.steps.add(report)
    assert registry.get_sample_value("paceline:source_turns_total", {"source": "medusa"}) == 6
    assert registry.get_sample_value("paceline:round_hits_total") == 2
    assert registry.get_sample_value("paceline:draft_round_trip_seconds_sum") == 1.5
    assert registry.get_sample_value("vllm:kv_cache_usage_perc", MODEL) == 0.5


def test_tokens_are_counted_as_they_are_committed_and_times_when_a_session_ends():
    registry = CollectorRegistry()
    timings = Timings(queue_ns=2_000_000_000, prefill_ns=500_000_000, decode_ns=4_000_000_000)
    result = GenerateResult(
        finish_reason=FinishReason.LENGTH,
        num_prompt_tokens=3,
        num_cached_tokens=0,
        num_generated_tokens=5,
        timings=timings,
    )
    commit = StepCommit(
        ends=[2, 3, 5],
        tokens=[7, 8, 9, 5, 6],
        events={1: SessionEvent(running=True), 2: SessionEvent(result=result)},
        errors={3: UnavailableError("its model gave nothing to choose from")},
    )
    output = TargetOutput(commit=commit, to_drafters={}, broken_links={}, report=StepReport())
    VerifierMetrics(registry, "tiny").add(output)
    assert registry.get_sample_value("vllm:generation_tokens_total", MODEL) == 5
    sums = {
        name: registry.get_sample_value(f"vllm:request_{name}_seconds_sum", MODEL)
        for name in ("queue_time", "prefill_time", "decode_time", "time_per_output_token")
    }
    assert sums == {"queue_time": 2.0, "prefill_time": 0.5, "decode_time": 4.0, "time_per_output_token": 1.0}
    assert registry.get_sample_value("vllm:request_queue_time_seconds_count", MODEL) == 1
