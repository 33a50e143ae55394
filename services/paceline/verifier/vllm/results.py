"""Turns vLLM's results into ours; its objects are read by attribute name, and nothing of it is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.messages import NS_PER_S, FinishReason, PositionLogprobs, SpeculationRecord, Timings
from paceline.core.target_events import StepReport

KV_USAGE = "vllm:kv_cache_usage_perc"
FINISH_REASONS = {each.value: each for each in FinishReason}


def position_logprobs(token_id: int, known: Mapping[int, Any], count: int) -> PositionLogprobs:
    """Log probabilities of one position.

    Args:
        token_id: The token chosen.
        known: vLLM's `Logprob` by token: the chosen one and the `count` best, which may include it.
        count: How many best ones were requested.
    """
    best = {each: entry for each, entry in known.items() if len(known) <= count or each != token_id}
    top = sorted(best.items(), key=lambda item: item[1].rank)[:count]
    return PositionLogprobs(
        token_id=token_id,
        logprob=known[token_id].logprob,
        top=tuple((each, entry.logprob) for each, entry in top),
    )


def speculation_record(counts: Any, *, num_steps: int, mean_batch_size: float, lossy: bool) -> SpeculationRecord:
    """Speculation counts of a session.

    Args:
        counts: vLLM's `RequestSpecDecodeMetrics`; None: it did not speculate.
        num_steps: Steps that brought tokens.
        mean_batch_size: Mean number of sessions that got tokens in them.
        lossy: See `paceline.verifier.vllm.sampling.counted_anew`.
    """
    histogram = () if counts is None else _without_end(counts.histogram)
    return SpeculationRecord(
        num_steps=num_steps,
        num_spec_steps=sum(histogram),
        num_draft_tokens=0 if counts is None else counts.num_draft_tokens,
        num_accepted_draft_tokens=sum(length * rounds for length, rounds in enumerate(histogram)),
        acceptance_histogram=histogram,
        mean_batch_size=mean_batch_size,
        lossy=lossy,
        distribution_only=True,
    )


def timings(stats: Any, submitted_s: float) -> Timings:
    """Where the time of a session went, from vLLM's `RequestStateStats`; both use the host's monotonic clock."""
    spans_s = (
        stats.scheduled_ts - submitted_s,
        stats.first_token_ts - stats.scheduled_ts,
        stats.last_token_ts - stats.first_token_ts,
    )
    queue_ns, prefill_ns, decode_ns = (max(0, int(span_s * NS_PER_S)) for span_s in spans_s)
    return Timings(queue_ns=queue_ns, prefill_ns=prefill_ns, decode_ns=decode_ns)


def add_scheduler(report: StepReport, scheduler: Any, iteration: Any) -> None:
    """Adds to a report what vLLM's scheduler did.

    Args:
        report: The step's report.
        scheduler: vLLM's `SchedulerStats`.
        iteration: vLLM's `IterationStats`; None: the step brought no tokens.
    """
    report.num_running = scheduler.num_running_reqs
    report.num_waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
    report.levels[KV_USAGE] = scheduler.kv_cache_usage
    report.count("vllm:prefix_cache_queries", by=scheduler.prefix_cache_stats.queries)
    report.count("vllm:prefix_cache_hits", by=scheduler.prefix_cache_stats.hits)
    if iteration is not None:
        report.count("vllm:num_preemptions", by=iteration.num_preempted_reqs)
        report.num_prefill_rows = iteration.num_prompt_tokens
    drafted = scheduler.spec_decoding_stats
    if drafted is not None and drafted.num_drafts:
        report.accepted = _lengths(drafted.num_drafts, drafted.num_accepted_tokens_per_pos)
        report.gammas = _lengths(drafted.num_drafts, drafted.num_draft_tokens_per_pos)


def _lengths(count: int, at_least: Sequence[int]) -> list[int]:
    """Returns `count` lengths, longest first, of which `at_least[k]` exceed k."""
    return [sum(number > index for number in at_least) for index in range(count)]


def _without_end(histogram: Sequence[int]) -> tuple[int, ...]:
    """Returns a histogram without trailing zeros."""
    longest = max((length for length, rounds in enumerate(histogram) if rounds), default=-1)
    return tuple(histogram[: longest + 1])
