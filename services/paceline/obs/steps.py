"""Counts what a verifier's steps did, and what became of its sessions."""

from __future__ import annotations

from paceline.core.messages import NS_PER_S, CommittedTokens, GenerateResult
from paceline.core.target_events import StepReport, TargetOutput
from paceline.obs.metrics import VerifierMetrics, rows_label


def record_output(metrics: VerifierMetrics, output: TargetOutput) -> None:
    report = output.report
    whole = [each for _, each in output.news if isinstance(each, CommittedTokens)]
    num_tokens = len(output.commit.tokens) + sum(len(each.token_ids) for each in whole)
    report.count("vllm:generation_tokens", by=num_tokens)
    for each in (*whole, *output.commit.rare.values()):
        if each.result is not None:
            _add_session(report, each.result)
    record_step(metrics, report)


def _add_session(report: StepReport, result: GenerateResult) -> None:
    """Counts where the time of an ended session went."""
    timings = result.timings
    decode_s = timings.decode_ns / NS_PER_S
    seconds = {"queue": timings.queue_ns / NS_PER_S, "prefill": timings.prefill_ns / NS_PER_S, "decode": decode_s}
    for name, value in seconds.items():
        report.samples[f"vllm:request_{name}_time_seconds"].append(value)
    if result.num_generated_tokens > 1:
        mean_s = decode_s / (result.num_generated_tokens - 1)
        report.samples["vllm:request_time_per_output_token_seconds"].append(mean_s)


def record_step(metrics: VerifierMetrics, report: StepReport) -> None:
    report.levels["vllm:num_requests_running"] = report.num_running
    report.levels["vllm:num_requests_waiting"] = report.num_waiting
    if report.num_rows:
        report.levels["paceline:price"] = report.price
        report.samples["paceline:gamma"] += report.gammas
        metrics.step.labels(rows_label(report.num_rows)).observe(report.seconds)
        if report.reason is not None:
            metrics.show_mode(report.mode, report.reason)
            metrics.show_rates(report.measured)
        if report.accepted:
            metrics.speculation.add_rounds(num_draft_tokens=sum(report.gammas), num_accepted_tokens=report.accepted)
    metrics.meter.record(report)
