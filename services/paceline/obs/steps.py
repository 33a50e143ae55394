"""Counts what a verifier's steps did, and what became of its sessions."""

from __future__ import annotations

from collections import Counter

from paceline.core.messages import NS_PER_S, CommittedTokens, GenerateResult
from paceline.core.target_events import StepReport, TargetOutput
from paceline.obs.metrics import VerifierMetrics, rows_label


def record_output(metrics: VerifierMetrics, output: TargetOutput) -> None:
    record_step(metrics, output.report)
    committed = [each for _, each in output.committed if isinstance(each, CommittedTokens)]
    metrics.sessions.generation_tokens.inc(sum(len(each.token_ids) for each in committed))
    for each in committed:
        if each.result is not None:
            record_session(metrics, each.result)


def record_session(metrics: VerifierMetrics, result: GenerateResult) -> None:
    """Counts where the time of an ended session went."""
    sessions, timings = metrics.sessions, result.timings
    decode_s = timings.decode_ns / NS_PER_S
    sessions.queue_time.observe(timings.queue_ns / NS_PER_S)
    sessions.prefill_time.observe(timings.prefill_ns / NS_PER_S)
    sessions.decode_time.observe(decode_s)
    if result.num_generated_tokens > 1:
        sessions.time_per_output_token.observe(decode_s / (result.num_generated_tokens - 1))


def record_step(metrics: VerifierMetrics, report: StepReport) -> None:
    metrics.sessions.num_running.set(report.num_running)
    metrics.sessions.num_waiting.set(report.num_waiting)
    metrics.cache.usage.set(report.kv_usage)
    metrics.drafter_lag.set(report.lag_tokens)
    if report.num_silenced:
        metrics.fallbacks.labels("drafter_silent").inc(report.num_silenced)
    for round_trip_s, num_sessions in Counter(report.round_trips_s).items():
        metrics.draft_round_trip.observe_alike(round_trip_s, num_sessions)
    _record_nodes(metrics, report)
    if not report.num_rows:
        return
    metrics.cache.prefix_queries.inc(report.prefix_queries)
    metrics.cache.prefix_hits.inc(report.prefix_hits)
    metrics.sessions.num_preemptions.inc(report.num_preempted)
    metrics.step.labels(rows_label(report.num_rows)).observe(report.seconds)
    metrics.price.set(report.price)
    if report.reason is not None:
        metrics.show_mode(drafts=report.drafts, reason=report.reason)
    for gamma, num_sessions in Counter(report.gammas).items():
        metrics.gamma.observe_alike(gamma, num_sessions)
    if report.accepted:
        metrics.speculation.add_rounds(num_draft_tokens=sum(report.gammas), num_accepted_tokens=report.accepted)
        metrics.round_hits.inc(report.num_hits)
        metrics.round_misses.inc(report.num_misses)
    for source, seconds in report.asked_s.items():
        metrics.source_seconds.labels(source).inc(seconds)
        metrics.source_turns.labels(source).inc(report.asked_of[source])


def _record_nodes(metrics: VerifierMetrics, report: StepReport) -> None:
    for fate, counts in (
        ("accepted", report.accepted_by),
        ("rejected", report.verified_by - report.accepted_by),
        ("unverified", report.unverified_by),
        ("late", report.late_by),
    ):
        for source, count in counts.items():
            metrics.draft_nodes.labels(source, fate).inc(count)
