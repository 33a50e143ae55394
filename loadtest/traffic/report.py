"""The reports of a replay: a few lines for the screen, all figures as JSON, and one HTML page with plots."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.streams import Ask
from loadtest.traffic.figures import PERCENTILES, Window
from loadtest.traffic.plots import plots

# Times of tables are milliseconds.
LATENCIES = (("ttft_ms", "TTFT"), ("itl_ms", "ITL"), ("e2e_ms", "E2E"))
HOW_COUNTED = (
    "Open loop: requests are sent when the trace says. TTFT and E2E count from sending to the first token and to the "
    "last byte; ITL is the time between tokens, and tokens that come at once share their wait. Load is the output "
    "tokens that the requests of a stretch ask for; stretches are sorted into thirds, the same for every mode."
)
COMPARED = "Ratios of means over the same requests, with the middle 95 % of ratios of requests drawn anew."
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 82rem; margin: 2rem auto; padding: 0 1rem; color: #1d232b; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .6rem 0; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #d5dbe3; padding: .2rem .5rem; text-align: right; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
.ok { color: #1a7f37; font-weight: 600; } .failed { color: #c62828; font-weight: 600; }
svg { max-width: 100%; height: auto; } pre { background: #f3f5f8; padding: .7rem; overflow-x: auto; }
"""


def write_reports(
    out: Path,
    figures: Mapping[str, Any],
    runs: Mapping[str, Sequence[Window]],
    windows: Sequence[Sequence[Ask]],
) -> tuple[Path, Path]:
    """Writes `out` with .json and .html, and returns both."""
    out.parent.mkdir(parents=True, exist_ok=True)
    as_json, as_html = out.with_name(f"{out.name}.json"), out.with_name(f"{out.name}.html")
    as_json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    as_html.write_text(page(figures, plots(figures, runs, windows)), encoding="utf-8")
    return as_json, as_html


def summary(figures: Mapping[str, Any]) -> str:
    """Returns the tables for a terminal."""
    parts = [_described(figures), f"times in ms\n{_text(*_modes(figures))}"]
    if figures["comparison"]["buckets"]:
        parts += ["adaptive over the best other mode, means (95 % interval)", _text(*_comparison(figures))]
    return "\n\n".join([*parts, _verdict(figures)])


def page(figures: Mapping[str, Any], drawn: Mapping[str, str]) -> str:
    """Returns the HTML page; `drawn` are plots by title, as SVG."""
    passed = "ok" if figures["ok"] else "failed"
    settings = {name: figures[name] for name in ("replay", "dtype", "door", "windows", "trials")}
    compared = f"{COMPARED} At most {figures['comparison']['limit']:g} of E2E and ITL passes."
    sections = [
        f"<h1>Replay of {html.escape(figures['replay']['arrivals'])}</h1>",
        _paragraph(_described(figures)),
        f'<p class="{passed}">{html.escape(_verdict(figures))}</p>',
        f"<h2>By mode, times in ms</h2>{_table(*_modes(figures))}",
        f"<h2>By load, times in ms</h2>{_table(*_buckets(figures))}",
        *(f"<h2>{html.escape(title)}</h2>{svg}" for title, svg in drawn.items()),
        f"<h2>What was replayed</h2>{_paragraph(HOW_COUNTED)}<pre>{html.escape(json.dumps(settings, indent=1))}</pre>",
    ]
    if figures["comparison"]["buckets"]:
        table = f"{_paragraph(compared)}{_table(*_comparison(figures))}"
        sections.insert(4, f"<h2>Adaptive over the best other mode</h2>{table}")
    head = f'<meta charset="utf-8"><title>Paceline load</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(sections)}</body></html>\n"


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _described(figures: Mapping[str, Any]) -> str:
    return (
        "{requests} requests in {minutes:g} minutes ({rate_per_s:g} a second, {windows} windows) of {arrivals}; "
        "lengths fitted to the model: prompts times {prompt_scale:g} and at most {max_prompt_tokens} "
        "({prompts_clipped} clipped), outputs times {output_scale:g} and at most {max_output_tokens} "
        "({outputs_clipped} clipped); prompts: {prompts}; temperature {temperature:g}; {machine}, {dtype}, over {door}"
    ).format(**{**figures, **figures["replay"]})


def _verdict(figures: Mapping[str, Any]) -> str:
    checks = ", ".join(
        f"{name.replace('_', ' ')}: {'yes' if held else 'NO'}" for name, held in figures["checks"].items()
    )
    return f"ok: {str(figures['ok']).lower()} ({checks})"


def _modes(figures: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    head = ["speculation", "requests", "errors", "tokens/s", "running", "drafts/step", "accepted"]
    head += [f"{title} p{percent}" for _, title in LATENCIES for percent in PERCENTILES]
    head += ["sent late p99"]
    rows = []
    for mode, of in figures["modes"].items():
        errors = ", ".join(f"{count} {kind}" for kind, count in of["errors"].items()) or "0"
        row = [mode, of["requests"], errors, of["output_tokens_per_s"], of["mean_running"]]
        row += [of["draft_tokens_per_step"], of["acceptance_rate"]]
        row += [_shown(of[name], f"p{percent}") for name, _ in LATENCIES for percent in PERCENTILES]
        rows.append([*map(str, row), _shown(of["sender_late_ms"], "p99")])
    return head, rows


def _buckets(figures: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    columns = ("mean", *(f"p{percent}" for percent in PERCENTILES))
    head = ["load, speculation", "requests", *(f"{title} {column}" for _, title in LATENCIES for column in columns)]
    rows = [
        [f"{bucket}, {mode}", str(of["requests"])]
        + [_shown(latencies[name], column) for name, _ in LATENCIES for column in columns]
        for bucket, of in figures["buckets"].items()
        for mode, latencies in of["modes"].items()
    ]
    return head, rows


def _comparison(figures: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    head = ["load", "requests", "E2E", "ITL", "TTFT"]
    rows = [
        [bucket, str(row["requests"]), *(_ratio(row[name]) for name in ("e2e", "itl", "ttft"))]
        for bucket, row in figures["comparison"]["buckets"].items()
    ]
    return head, rows


def _shown(of: Mapping[str, float], column: str) -> str:
    """Three digits or more of a time in milliseconds."""
    return "-" if column not in of else f"{of[column]:.0f}" if of[column] >= 100.0 else f"{of[column]:.1f}"


def _ratio(of: Mapping[str, Any]) -> str:
    low, high = of["interval"]
    return f"{of['ratio']:.3f} ({low:.3f} to {high:.3f}) of {of['best_other']}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + row(head, "th") + "".join(row(cells, "td") for cells in rows) + "</table>"


def _text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows))
    return "\n".join(lines)
