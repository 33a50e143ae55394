"""What a newcomer looks for is where tests/docs/where.yaml says."""

from __future__ import annotations

import ast
from pathlib import Path

import yaml

from tests.support.site import ROOT

SOURCES = ROOT / "services" / "paceline"


def test_a_newcomer_finds_the_answers_to_25_questions() -> None:
    places = yaml.safe_load(Path(__file__).with_name("where.yaml").read_text(encoding="utf-8"))
    assert len(places) == 25
    for question, place in places.items():
        file, symbol = place.split()
        assert symbol in symbols(SOURCES / file), question


def symbols(path: Path) -> set[str]:
    """Functions and classes of a module, methods as `Class.method`."""
    top = [each for each in ast.parse(path.read_text(encoding="utf-8")).body if hasattr(each, "name")]
    methods = {f"{each.name}.{inner.name}" for each in top for inner in each.body if hasattr(inner, "name")}
    return {each.name for each in top} | methods
