"""What pages call by name is there: metrics, targets of make, benches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.references import DOCS
from tests.support.site import ROOT, pages

METRICS = set(re.findall(r"^\| `([a-z]+:\w+)` \|", (DOCS / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE))
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def named(pattern: str, page: Path) -> set[str]:
    return set(re.findall(pattern, page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_names_metrics_and_targets_that_are_there(page: Path) -> None:
    # A page that compares the two names metrics of vLLM's that are not here.
    kinds = "paceline" if page.name == "moving-from-vllm.md" else "paceline|vllm"
    metrics = {re.sub(r"_(bucket|sum|count)$", "", name) for name in named(rf"\b(?:{kinds}):[a-z]\w+", page)}
    assert {name for name in metrics if not {name, f"{name}_total"} & METRICS} == set()
    assert named(r"\bmake ([a-z0-9-]+)(?=`| NAME=| ARGS=)", page) <= TARGETS


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_names_benches_that_are_there(page: Path) -> None:
    benches = {path.stem for path in (ROOT / "loadtest").iterdir()}
    assert named(r"\bmake bench NAME=(\w+)", page) <= benches
