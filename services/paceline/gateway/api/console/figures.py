"""From Prometheus pages to the figures of the console: what happened between two readings of a service.

Pure. It knows the names of metrics, no services and no network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

Json = dict[str, Any]

# Samples are kept apart by these labels, and summed over all others.
KEPT_LABELS = ("position", "drafter")
WANTED = (
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_waiting",
    "paceline:gamma_sum",
    "paceline:gamma_count",
    "paceline:step_seconds_count",
    "paceline:price",
    "paceline:round_hits_total",
    "paceline:round_misses_total",
    "paceline:draft_round_trip_seconds_sum",
    "paceline:draft_round_trip_seconds_count",
    "paceline:drafter_lag_tokens",
    "paceline:drafted_sessions",
    "paceline:drafter_nodes_sent_total",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A service's metrics at one time.

    Attributes:
        taken_s: When, in monotonic seconds.
        samples: Values by name, and by the value of the label that is kept or "".
    """

    taken_s: float
    samples: Mapping[tuple[str, str], float]

    def value(self, name: str) -> float:
        """Returns a sample without label; 0 if there is none, as for a counter that never counted."""
        return self.samples.get((name, ""), 0.0)

    def by_label(self, name: str) -> dict[str, float]:
        """Returns the samples of a name by their label."""
        return {label: value for (each, label), value in self.samples.items() if each == name and label}


def read_page(page: str, taken_s: float) -> Reading:
    """Returns the wanted samples of a page of metrics.

    Raises:
        ValueError: It is no such page.
    """
    # Most lines are buckets of histograms, and parsing is what takes time.
    lines = [line for line in page.splitlines() if line.startswith(WANTED)]
    samples: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families("\n".join(lines)):
        for sample in family.samples:
            label = next((sample.labels[name] for name in KEPT_LABELS if name in sample.labels), "")
            key = (sample.name, label)
            samples[key] = samples.get(key, 0.0) + sample.value
    return Reading(taken_s=taken_s, samples=samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a verifier did, or several together, each a second.

    Attributes:
        steps: Forward passes.
        turns: Sessions that decoded, once a step; each got a token of the target's own.
        drafted: Draft tokens verified.
        accepted: Those of them that matched.
        rounds: Turns with at least one draft token.
        accepted_by_position: Rounds in which the first, second, ... draft token of the path matched.
        hits: Rounds whose committed tokens were all in the tree.
        misses: The others.
        round_trips: Answers of drafters to commits.
        round_trips_s: Seconds these took.
    """

    steps: float = 0.0
    turns: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    rounds: float = 0.0
    accepted_by_position: tuple[float, ...] = ()
    hits: float = 0.0
    misses: float = 0.0
    round_trips: float = 0.0
    round_trips_s: float = 0.0

    def figures(self) -> Json:
        """Returns what the console shows of them; None where nothing happened that could be measured."""
        return {
            "tokens_per_s": self.turns + self.accepted,
            "accepted_per_s": self.accepted,
            "batch_size": _ratio(self.turns, self.steps),
            "gamma": _ratio(self.drafted, self.turns),
            "hit_rate": _ratio(self.hits, self.hits + self.misses),
            "round_trip_s": _ratio(self.round_trips_s, self.round_trips),
            "rounds_per_s": self.rounds,
            "accepted_by_position_per_s": list(self.accepted_by_position),
        }


def verifier_rates(before: Reading, after: Reading) -> Rates | None:
    """Returns what happened between two readings of a verifier; None where it started anew, or no time has passed."""
    elapsed_s = after.taken_s - before.taken_s
    if elapsed_s <= 0 or after.value("paceline:gamma_count") < before.value("paceline:gamma_count"):
        return None

    def rate(name: str) -> float:
        return (after.value(name) - before.value(name)) / elapsed_s

    by_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    sooner, later = before.by_label(by_position), after.by_label(by_position)
    positions = range(len(later))
    return Rates(
        steps=rate("paceline:step_seconds_count"),
        turns=rate("paceline:gamma_count"),
        drafted=rate("paceline:gamma_sum"),
        accepted=rate("vllm:spec_decode_num_accepted_tokens_total"),
        rounds=rate("vllm:spec_decode_num_drafts_total"),
        accepted_by_position=tuple(
            (later.get(str(at), 0.0) - sooner.get(str(at), 0.0)) / elapsed_s for at in positions
        ),
        hits=rate("paceline:round_hits_total"),
        misses=rate("paceline:round_misses_total"),
        round_trips=rate("paceline:draft_round_trip_seconds_count"),
        round_trips_s=rate("paceline:draft_round_trip_seconds_sum"),
    )


def sum_of_rates(rates: Sequence[Rates]) -> Rates:
    """Returns what several verifiers did together."""
    by_position = zip_longest(*(each.accepted_by_position for each in rates), fillvalue=0.0)
    names = [field.name for field in fields(Rates) if field.name != "accepted_by_position"]
    return Rates(
        accepted_by_position=tuple(map(sum, by_position)),
        **{name: sum(getattr(each, name) for each in rates) for name in names},
    )


def mean_price(prices: Sequence[tuple[float, float]]) -> float | None:
    """Returns the mean of (price, steps a second), weighted by the steps; None where no verifier steps."""
    return _ratio(sum(price * steps for price, steps in prices), sum(steps for _, steps in prices))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
