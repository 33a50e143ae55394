"""Printed report of a replay: what was replayed, and tables by mode, by load and of the comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadtest.bench import show
from loadtest.traffic.figures import PERCENTILES

LATENCIES = ("ttft_ms", "itl_ms", "e2e_ms")


def print_tables(figures: Mapping[str, Any]) -> None:
    """Prints all tables; times are in milliseconds, of the comparison ratios of means with 95 % intervals."""
    print(_described(figures))
    print("\nby mode, times in ms")
    show(_mode(mode, of) for mode, of in figures["modes"].items())
    print("\nby load, times in ms")
    show(
        {"load": bucket, "speculation": mode, "requests": of["requests"], **_latencies(times)}
        for bucket, of in figures["buckets"].items()
        for mode, times in of["modes"].items()
    )
    if compared := figures["comparison"]["buckets"]:
        print("\nadaptive over the best other mode, ratios of means (95 % interval)")
        show(
            {"load": bucket, **{name: _ratio(value) for name, value in row.items()}} for bucket, row in compared.items()
        )
    print()


def _described(figures: Mapping[str, Any]) -> str:
    return (
        "{requests} requests in {minutes:g} minutes ({rate_per_s:g} a second, {windows} windows) of {arrivals}; "
        "lengths fitted to the model: prompts times {prompt_scale:g} and at most {max_prompt_tokens} "
        "({prompts_clipped} clipped), outputs times {output_scale:g} and at most {max_output_tokens} "
        "({outputs_clipped} clipped); prompts: {prompts}; temperature {temperature:g}; {machine}, {dtype}, over {door}"
    ).format(**{**figures, **figures["replay"]})


def _mode(mode: str, of: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "speculation": mode,
        "requests": of["requests"],
        "errors": ", ".join(f"{count} {kind}" for kind, count in of["errors"].items()) or "0",
        "tokens_per_s": of["output_tokens_per_s"],
        "running": of["mean_running"],
        "drafts_per_step": of["draft_tokens_per_step"],
        "accepted": of["acceptance_rate"],
        **_latencies(of),
        "sent_late_p99": of["sender_late_ms"].get("p99"),
    }


def _latencies(times: Mapping[str, Any]) -> dict[str, Any]:
    columns = [f"p{percent}" for percent in PERCENTILES]
    return {name: {column: times[name].get(column) for column in columns} for name in LATENCIES}


def _ratio(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    low, high = value["interval"]
    return f"{value['ratio']:.3f} ({low:.3f} to {high:.3f}) of {value['best_other']}"
