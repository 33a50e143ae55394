"""Times one session for the metrics that clients of this kind of server expect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from paceline.gateway.sessions.output import Ending
from paceline.obs.metrics import ModelMetrics


class Stopwatch:
    """Observes one session; starts running when built, and counts as waiting from entry to its first token."""

    def __init__(self, metrics: ModelMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._started_s = clock()
        self._last_s: float | None = None

    def __enter__(self) -> Self:
        self._metrics.num_requests_running.inc()
        self._metrics.num_requests_waiting.inc()
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.num_requests_running.dec()
        if self._last_s is None:
            self._metrics.num_requests_waiting.dec()

    def tokens(self, num_tokens: int) -> None:
        """Counts tokens that arrived now."""
        if not num_tokens:
            return
        now_s = self._clock()
        self._metrics.generation_tokens.inc(num_tokens)
        if self._last_s is None:
            self._metrics.num_requests_waiting.dec()
            self._metrics.time_to_first_token.observe(now_s - self._started_s)
        else:
            for _ in range(num_tokens):
                self._metrics.inter_token_latency.observe((now_s - self._last_s) / num_tokens)
        self._last_s = now_s

    def ended(self, ending: Ending) -> None:
        """Counts a session that ended well."""
        self._metrics.e2e_request_latency.observe(self._clock() - self._started_s)
        self._metrics.request_prompt_tokens.observe(ending.num_prompt_tokens)
        self._metrics.request_generation_tokens.observe(ending.num_generated_tokens)
        self._metrics.request_success.labels(ending.finish_reason.value).inc()
        if ending.speculation is not None:
            self._metrics.speculation.add_session(
                num_draft_tokens=ending.speculation.num_draft_tokens,
                acceptance_histogram=ending.speculation.acceptance_histogram,
            )
