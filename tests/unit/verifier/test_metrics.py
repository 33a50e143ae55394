"""Step reports become metrics."""

from __future__ import annotations

from collections import Counter

from prometheus_client import CollectorRegistry

from paceline.engine.target_events import StepReport
from paceline.obs.metrics import VerifierMetrics
from paceline.verifier.metrics import record_served_by, record_step


def test_time_and_turns_of_sources_that_are_not_free_are_counted():
    registry = CollectorRegistry()
    metrics = VerifierMetrics(registry)
    for seconds in (0.25, 0.5):
        report = StepReport(num_rows=4, asked_of=Counter(medusa=3), asked_s={"medusa": seconds})
        record_step(metrics, report)
    assert registry.get_sample_value("paceline:source_seconds_total", {"source": "medusa"}) == 0.75
    assert registry.get_sample_value("paceline:source_turns_total", {"source": "medusa"}) == 6


def test_a_drafter_is_shown_while_it_has_sessions_and_no_longer():
    registry = CollectorRegistry()
    metrics = VerifierMetrics(registry)
    for num_sessions in (1, 2):
        record_served_by(metrics, "10.0.0.7:8201", num_sessions)
    label = {"drafter": "10.0.0.7:8201"}
    assert registry.get_sample_value("paceline:drafted_sessions", label) == 2
    record_served_by(metrics, "10.0.0.7:8201", 0)
    assert registry.get_sample_value("paceline:drafted_sessions", label) is None
