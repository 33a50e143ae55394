"""Plots of a replay as SVG; matplotlib is of the dev extra."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.streams import Ask
from loadtest.traffic.config import ADAPTIVE, OFF, ON
from loadtest.traffic.figures import BUCKETS, Latencies, Window, length_of, running_over_time

COLOURS = {OFF: "#6b7280", ON: "#d97706", ADAPTIVE: "#2563eb"}
STEP_S = 1.0
# Points of a distribution that are drawn; more are not seen.
MAX_POINTS = 400


def plots(
    figures: Mapping[str, Any], runs: Mapping[str, Sequence[Window]], windows: Sequence[Sequence[Ask]]
) -> dict[str, str]:
    """Returns plots by title."""
    latencies = {mode: Latencies.of([each for window in of for each in window]) for mode, of in runs.items()}
    return {
        "Requests as they arrive": _svg(1, lambda axes: _arrivals(axes[0], windows)),
        "Requests under way, windows one after another": _svg(1, lambda axes: _running(axes[0], runs)),
        "Time to first token, and time between tokens": _svg(2, lambda axes: _distributions(axes, latencies)),
        "Means by load": _svg(2, lambda axes: _by_load(axes, figures["buckets"])),
    }


def _svg(num_axes: int, draw: Any) -> str:
    with mpl.rc_context({"svg.hashsalt": "paceline", "svg.fonttype": "path", "font.size": 9}):
        figure = Figure(figsize=(10.0, 3.2), layout="constrained")
        axes = figure.subplots(1, num_axes, squeeze=False)[0]
        for each in axes:
            each.spines[["top", "right"]].set_visible(False)
            each.grid(alpha=0.25)
        draw(axes)
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None})
    text = target.getvalue()
    return text[text.index("<svg") :]


def _arrivals(axes: Axes, windows: Sequence[Sequence[Ask]]) -> None:
    offset_s = 0.0
    for number, window in enumerate(windows):
        length_s = max((each.due_s for each in window), default=0.0)
        edges = np.arange(0.0, length_s + 5.0, 5.0)
        counts, _ = np.histogram([each.due_s for each in window], edges)
        axes.stairs(counts / 5.0, offset_s + edges, fill=True, color="#93c5fd" if number % 2 else "#60a5fa")
        offset_s += float(edges[-1])
    axes.set(xlabel="s, windows in turn coloured", ylabel="requests/s")


def _running(axes: Axes, runs: Mapping[str, Sequence[Window]]) -> None:
    lengths_s = [max(map(length_of, same)) for same in zip(*runs.values(), strict=True)]
    for mode, windows in runs.items():
        axes.plot(*running_over_time(windows, lengths_s, STEP_S), label=mode, color=COLOURS[mode], linewidth=1.2)
    axes.set(xlabel="s", ylabel="requests under way")
    axes.legend(frameon=False)


def _distributions(axes: Sequence[Axes], latencies: Mapping[str, Latencies]) -> None:
    for each, title, name in zip(
        axes, ("time to first token, ms", "time between tokens, ms"), ("ttft_s", "itl_s"), strict=True
    ):
        for mode, of in latencies.items():
            values = getattr(of, name)
            if len(values):
                shares = np.linspace(0.0, 1.0, MAX_POINTS)
                # Tokens of one piece have no gap that a logarithm could show.
                cuts = np.maximum(1000.0 * np.quantile(values, shares), 0.1)
                each.plot(cuts, shares, label=mode, color=COLOURS[mode])
        each.set(xscale="log", xlabel=title, ylabel="share within")
        each.legend(frameon=False)


def _by_load(axes: Sequence[Axes], buckets: Mapping[str, Any]) -> None:
    names = [bucket for bucket in BUCKETS if bucket in buckets]
    for each, key, title in zip(axes, ("e2e_ms", "itl_ms"), ("time of a request, ms", "time a token, ms"), strict=True):
        modes = list(buckets[names[0]]["modes"]) if names else []
        width = 0.8 / max(1, len(modes))
        for number, mode in enumerate(modes):
            means = [buckets[bucket]["modes"][mode][key].get("mean", 0.0) for bucket in names]
            places = np.arange(len(names)) + (number - (len(modes) - 1) / 2) * width
            each.bar(places, means, width, label=mode, color=COLOURS[mode])
        each.set_xticks(range(len(names)), names)
        each.set(xlabel="load", ylabel=title)
        each.legend(frameon=False)
