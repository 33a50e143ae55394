"""Turns the engine's step reports into metrics."""

from __future__ import annotations

from paceline.core.params import DRAFT_MODEL
from paceline.engine.target_events import StepReport
from paceline.obs.metrics import VerifierMetrics, rows_label


def record_served_by(metrics: VerifierMetrics, drafter: str, num_sessions: int) -> None:
    """Shows how many sessions a drafter drafts for; one that has none is not shown, as addresses come and go."""
    if num_sessions:
        metrics.drafted_sessions.labels(drafter).set(num_sessions)
    else:
        metrics.drafted_sessions.remove(drafter)


def record_step(metrics: VerifierMetrics, report: StepReport) -> None:
    """Counts one step."""
    engine = metrics.engine
    engine.num_requests_running.set(report.num_running)
    engine.num_requests_waiting.set(report.num_waiting)
    engine.kv_cache_usage.set(report.kv_usage)
    engine.prefix_cache_queries.inc(report.prefix_queries)
    engine.prefix_cache_hits.inc(report.prefix_hits)
    if report.num_silenced:
        metrics.fallbacks.labels("drafter_silent").inc(report.num_silenced)
    for round_trip_s in report.round_trips_s:
        metrics.draft_round_trip.observe(round_trip_s)
    metrics.drafter_lag.set(report.lag_tokens)
    if not report.num_rows:
        return
    metrics.step.labels(rows_label(report.num_rows)).observe(report.seconds)
    metrics.price.set(report.price)
    metrics.round_hits.inc(report.num_hits)
    metrics.round_misses.inc(report.num_misses)
    for gamma in report.gammas:
        metrics.gamma.observe(gamma)
    drafted = [gamma for gamma in report.gammas if gamma]
    for gamma, accepted in zip(drafted, report.accepted, strict=True):
        metrics.speculation.add_round(num_draft_tokens=gamma, num_accepted_tokens=accepted)
    for source, count in report.accepted_by.items():
        metrics.draft_nodes.labels(source, "accepted").inc(count)
    for source, count in (report.verified_by - report.accepted_by).items():
        metrics.draft_nodes.labels(source, "rejected").inc(count)
    for source, seconds in report.asked_s.items():
        metrics.source_seconds.labels(source).inc(seconds)
        metrics.source_turns.labels(source).inc(report.asked_of[source])
    if report.num_late_nodes + report.num_stale_nodes:
        metrics.draft_nodes.labels(DRAFT_MODEL, "late").inc(report.num_late_nodes + report.num_stale_nodes)
