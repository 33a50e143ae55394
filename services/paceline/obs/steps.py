"""Counts what a verifier's steps did, and what became of its sessions."""

from __future__ import annotations

from paceline.core.messages import NS_PER_S, CommittedTokens, GenerateResult
from paceline.core.target_events import StepReport, TargetOutput
from paceline.obs.metrics import VerifierMetrics


def record_output(metrics: VerifierMetrics, output: TargetOutput) -> None:
    report = output.report
    whole = [each for _, each in output.news if isinstance(each, CommittedTokens)]
    num_tokens = len(output.commit.tokens) + sum([len(each.token_ids) for each in whole])
    report.count("vllm:generation_tokens", by=num_tokens)
    for each in (*whole, *output.commit.rare.values()):
        if each.result is not None:
            _add_session(report, each.result)
    metrics.steps.add(report)


def _add_session(report: StepReport, result: GenerateResult) -> None:
    """Counts where the time of an ended session went."""
    timings = result.timings
    decode_s = timings.decode_ns / NS_PER_S
    seconds = {"queue": timings.queue_ns / NS_PER_S, "prefill": timings.prefill_ns / NS_PER_S, "decode": decode_s}
    for name, value in seconds.items():
        report.sample(f"vllm:request_{name}_time_seconds", value)
    if result.num_generated_tokens > 1:
        mean_s = decode_s / (result.num_generated_tokens - 1)
        report.sample("vllm:request_time_per_output_token_seconds", mean_s)
