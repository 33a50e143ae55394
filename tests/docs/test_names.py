"""What pages call by name is there: metrics, targets of make, benches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.references import DOCS
from tests.support.site import ROOT, pages

METRICS = set(re.findall(r"^\| `([a-z]+:\w+)` \|", (DOCS / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE))
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
BENCHES = {path.stem for path in (ROOT / "loadtest").iterdir()}


def test_pages_name_metrics_targets_and_benches_that_are_there() -> None:
    assert [f"{page.name}: {name}" for page in pages() for name in unknown(page)] == []


def unknown(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    # The page that compares the two also names metrics that only vLLM has.
    kinds = "paceline" if page.name == "moving-from-vllm.md" else "paceline|vllm"
    metrics = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(rf"\b(?:{kinds}):[a-z]\w+", text)}
    yield from (name for name in sorted(metrics) if not {name, f"{name}_total"} & METRICS)
    yield from set(re.findall(r"\bmake ([a-z0-9-]+)(?=`| NAME=| ARGS=)", text)) - TARGETS
    yield from set(re.findall(r"\bmake bench NAME=(\w+)", text)) - BENCHES
