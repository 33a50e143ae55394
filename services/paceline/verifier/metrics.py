"""Turns what the engine puts out into metrics; off the path of tokens, after they have been handed on."""

from __future__ import annotations

from paceline.core.messages import CommittedTokens, GenerateResult
from paceline.core.target_events import TargetOutput
from paceline.obs.metrics import VerifierMetrics
from paceline.obs.steps import record_step

NS_PER_S = 1e9


def record_output(metrics: VerifierMetrics, output: TargetOutput) -> None:
    """Counts one step and what it committed."""
    record_step(metrics, output.report)
    committed = [each for _, each in output.committed if isinstance(each, CommittedTokens)]
    metrics.sessions.generation_tokens.inc(sum(len(each.token_ids) for each in committed))
    for each in committed:
        if each.result is not None:
            record_session(metrics, each.result)


def record_session(metrics: VerifierMetrics, result: GenerateResult) -> None:
    """Counts where the time of a session went that has ended."""
    sessions, timings = metrics.sessions, result.timings
    decode_s = timings.decode_ns / NS_PER_S
    sessions.queue_time.observe(timings.queue_ns / NS_PER_S)
    sessions.prefill_time.observe(timings.prefill_ns / NS_PER_S)
    sessions.decode_time.observe(decode_s)
    if result.num_generated_tokens > 1:
        sessions.time_per_output_token.observe(decode_s / (result.num_generated_tokens - 1))
