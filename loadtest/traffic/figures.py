"""Figures of a replay: percentiles, load buckets, and how the modes compare in each. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loadtest.client import Completions
from loadtest.streams import Ask, Completion
from loadtest.traffic.config import ADAPTIVE

BUCKETS = ("low", "mid", "high")
PERCENTILES = (50, 95, 99)
# Most that adaptive speculation may take of the time of the best other mode, in any bucket.
MOST_RATIO = 1.02
RESAMPLES = 400
# Lower bound of a mean time, in seconds.
LEAST_S = 1e-6

Floats = npt.NDArray[np.float64]
Window = Sequence[Completion]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Times in seconds of some requests that were answered without error.

    Attributes:
        ttft_s: Time to first token, one a request.
        itl_s: Time between tokens, one a token.
        e2e_s: Time to the end, one a request.
    """

    ttft_s: Floats
    itl_s: Floats
    e2e_s: Floats

    @classmethod
    def of(cls, answers: Sequence[Completion]) -> Latencies:
        """Takes them from the answers without error."""
        good = [each for each in answers if not each.error]
        return cls(
            ttft_s=np.array([each.ttft_s for each in good]),
            itl_s=np.array([gap_s for each in good for gap_s in each.token_gaps_s]),
            e2e_s=np.array([each.e2e_s for each in good]),
        )

    def figures(self) -> dict[str, dict[str, float]]:
        """Returns mean and percentiles of each, in milliseconds."""
        return {
            name: milliseconds(values)
            for name, values in (("ttft_ms", self.ttft_s), ("itl_ms", self.itl_s), ("e2e_ms", self.e2e_s))
        }


def milliseconds(values_s: Floats) -> dict[str, float]:
    """Returns mean and percentiles in milliseconds; nothing of nothing."""
    if not len(values_s):
        return {}
    cuts = np.percentile(values_s, PERCENTILES)
    return {
        "mean": round(1000.0 * float(values_s.mean()), 2),
        **{f"p{percent}": round(1000.0 * float(cut), 2) for percent, cut in zip(PERCENTILES, cuts, strict=True)},
    }


def mode_figures(windows: Sequence[Window]) -> dict[str, Any]:
    """Returns what a table says of one mode over all its windows."""
    answers = [each for window in windows for each in window]
    seconds = sum(map(length_of, windows))
    good = [each for each in answers if not each.error]
    done, late_s = Completions(good), np.array([each.late_s for each in answers])
    return {
        "requests": len(answers),
        "errors": dict(Counter(each.error for each in answers if each.error)),
        "first_error": next((each.message for each in answers if each.error), ""),
        "seconds": round(seconds, 1),
        "prompt_tokens": sum(each.num_prompt_tokens for each in good),
        "output_tokens": done.num_tokens,
        "output_tokens_per_s": round(done.num_tokens / seconds, 1) if seconds else 0.0,
        "mean_running": round(sum(each.e2e_s for each in good) / seconds, 2) if seconds else 0.0,
        "sender_late_ms": milliseconds(late_s),
        **Latencies.of(answers).figures(),
        "draft_tokens_per_step": round(done.per("num_draft_tokens", "num_steps"), 2),
        "acceptance_rate": round(done.per("num_accepted_draft_tokens", "num_draft_tokens"), 3),
        "mean_acceptance_length": round(done.mean_acceptance_length, 2),
    }


def buckets_of(windows: Sequence[Sequence[Ask]], slot_s: float) -> dict[int, str]:
    """Sorts requests by the load at which they come, which is the same for every mode.

    Time is cut into slots; a slot's load is the output tokens that its requests ask for. The third of the slots with
    the least load is low, the third with the most is high.

    Returns:
        The bucket of each request's index.
    """
    slots: dict[tuple[int, int], list[Ask]] = {}
    for number, window in enumerate(windows):
        for each in window:
            slots.setdefault((number, int(each.due_s // slot_s)), []).append(each)
    ranked = sorted(slots, key=lambda slot: (sum(each.max_tokens for each in slots[slot]), slot))
    return {
        each.index: BUCKETS[rank * len(BUCKETS) // len(ranked)]
        for rank, slot in enumerate(ranked)
        for each in slots[slot]
    }


def bucket_figures(runs: Mapping[str, Sequence[Window]], buckets: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    """Returns latencies by bucket and mode."""
    figures: dict[str, dict[str, Any]] = {}
    for bucket in BUCKETS:
        members = {index for index, name in buckets.items() if name == bucket}
        if members:
            by_mode = {
                mode: [each for window in windows for each in window if each.index in members]
                for mode, windows in runs.items()
            }
            modes = {mode: Latencies.of(answers).figures() for mode, answers in by_mode.items()}
            figures[bucket] = {"requests": len(members), "modes": modes}
    return figures


def comparison(runs: Mapping[str, Sequence[Window]], buckets: Mapping[int, str], seed: int) -> dict[str, Any]:
    """Compares adaptive speculation with the best other mode, bucket by bucket.

    Means are compared, over requests that every mode answered: time to the end and to the first token a request, and
    time a token after the first. Adaptive passes if time to the end and time a token are at most `MOST_RATIO` of the
    best other mode's in each bucket. The interval is the middle 95 % of ratios of requests drawn anew with repetition.
    """
    others = [mode for mode in runs if mode != ADAPTIVE]
    result: dict[str, Any] = {"buckets": {}, "limit": MOST_RATIO}
    if ADAPTIVE not in runs or not others:
        return result
    sums = {mode: _sums(windows) for mode, windows in runs.items()}
    common = set.intersection(*(set(each) for each in sums.values()))
    for bucket in BUCKETS:
        members = sorted(index for index in common if buckets.get(index) == bucket)
        if members:
            tables = {mode: np.array([sums[mode][index] for index in members]) for mode in runs}
            result["buckets"][bucket] = _ratios(tables, others, seed)
    ratios = [row[name]["ratio"] for row in result["buckets"].values() for name in ("e2e", "itl")]
    result["ok"] = bool(ratios) and max(ratios) <= MOST_RATIO
    return result


def _sums(windows: Sequence[Window]) -> dict[int, tuple[float, float, float, int]]:
    """By request: time to the end, to the first token, between tokens in all, and the number of those gaps."""
    return {
        each.index: (each.e2e_s, each.ttft_s, sum(gaps := each.token_gaps_s), len(gaps))
        for window in windows
        for each in window
        if not each.error
    }


def _ratios(tables: Mapping[str, Floats], others: Sequence[str], seed: int) -> dict[str, Any]:
    """Ratios of means; `tables` are `[requests, (e2e, ttft, gaps, tokens)]`."""
    count = len(tables[ADAPTIVE])
    draws = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    row: dict[str, Any] = {"requests": count}
    for name, column in (("e2e", 0), ("ttft", 1), ("itl", 2)):
        best = min(others, key=lambda mode: _mean(tables[mode], column))
        ratio = _ratio(tables[ADAPTIVE], tables[best], column)
        drawn = [_ratio(tables[ADAPTIVE][draw], tables[best][draw], column) for draw in draws]
        low, high = np.quantile(drawn, (0.025, 0.975))
        row[name] = {
            "best_other": best,
            "ratio": round(ratio, 4),
            "interval": [round(float(low), 3), round(float(high), 3)],
        }
    return row


def _ratio(ours: Floats, others: Floats, column: int) -> float:
    """Ratio of two means; a few short answers may have no gap at all."""
    return _mean(ours, column) / max(LEAST_S, _mean(others, column))


def _mean(table: Floats, column: int) -> float:
    """A mean over requests; of gaps, over tokens."""
    weight = table[:, 3].sum() if column == 2 else len(table)
    return float(table[:, column].sum() / max(1.0, weight))


def different_texts(runs: Mapping[str, Sequence[Window]]) -> int:
    """Returns how many requests got another text in one mode than in another; promise 1 says none."""
    texts: dict[int, set[str]] = {}
    for windows in runs.values():
        for window in windows:
            for each in window:
                if not each.error:
                    texts.setdefault(each.index, set()).add(each.text)
    return sum(len(different) > 1 for different in texts.values())


def length_of(window: Window) -> float:
    """Seconds until the last request of a window ended."""
    return max((each.ended_s for each in window), default=0.0)
