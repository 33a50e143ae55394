"""Plans as a table, and as figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.planning.fleets import Plan
from paceline.planning.simulation import PERCENTILES, Way

MS = 1e3


def fleet_name(plan: Plan) -> str:
    """A fleet in a few words."""
    fleet = plan.fleet
    beside = f" + {fleet.num_drafters} drafters" if fleet.num_drafters else ""
    inside = ", drafters inside" if fleet.way is Way.COLOCATED else ""
    return f"{fleet.num_verifiers} verifiers{beside}{inside}"


def figures(plan: Plan) -> dict[str, Any]:
    """What is expected of a plan, as numbers."""
    outcome = plan.outcome
    latencies = {"ttft_ms": outcome.ttft_s(), "itl_ms": outcome.itl_s(), "e2e_ms": outcome.e2e_s()}
    return {
        "way": plan.fleet.way.value,
        "verifiers": plan.fleet.num_verifiers,
        "drafters": plan.fleet.num_drafters,
        "gpus": plan.fleet.num_gpus(plan.profile),
        "price_per_hour": round(plan.fleet.price_per_hour(plan.profile), 2),
        "price_per_million_tokens": round(plan.price_per_million, 3),
        "tokens_per_s": round(plan.tokens_per_s, 1),
        "gamma": round(outcome.gamma, 2),
        "tokens_per_step": round(outcome.tokens_per_step, 2),
        **{name: _by_percentile(values) for name, values in latencies.items()},
        "simulated_requests": len(outcome.requests),
        "unfinished_requests": outcome.num_unfinished,
        "meets_goals": plan.meets,
    }


def _by_percentile(values: Sequence[float]) -> dict[str, float]:
    return {f"p{percentile}": round(MS * value, 2) for percentile, value in zip(PERCENTILES, values, strict=True)}


COLUMNS = (
    "fleet",
    "GPUs",
    "price/h",
    "GPU hours/M tokens",
    "price/M tokens",
    "tokens/s",
    "TTFT ms p50/p95/p99",
    "ITL ms p50/p95/p99",
    "E2E s p50/p95/p99",
    "gamma",
    "goals",
)


def table(plans: Mapping[str, Plan]) -> str:
    """A Markdown table, a row for each plan."""
    return markdown([COLUMNS, *(_row(title, plan) for title, plan in plans.items())])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose first row has the titles."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    rule = "| " + " | ".join("-" * width for width in widths) + " |"
    return "\n".join([lines[0], rule, *lines[1:]])


def _row(title: str, plan: Plan) -> tuple[str, ...]:
    outcome, rate = plan.outcome, plan.tokens_per_s
    gpus = plan.fleet.num_gpus(plan.profile)
    return (
        f"{title}: {fleet_name(plan)}",
        f"{gpus:,}",
        f"{plan.fleet.price_per_hour(plan.profile):,.2f}",
        f"{gpus / (rate * 3600.0) * 1e6:.2f}" if rate else "-",
        f"{plan.price_per_million:.2f}",
        f"{rate:,.0f}",
        "/".join(f"{MS * value:.0f}" for value in outcome.ttft_s()),
        "/".join(f"{MS * value:.1f}" for value in outcome.itl_s()),
        "/".join(f"{value:.1f}" for value in outcome.e2e_s()),
        f"{outcome.gamma:.1f}",
        "met" if plan.meets else "missed",
    )
