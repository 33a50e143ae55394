"""What a newcomer looks for is where tests/docs/where.yaml says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

from tests.support.references import DOCS
from tests.support.site import ROOT

PLACES = yaml.safe_load(Path(__file__).with_name("where.yaml").read_text(encoding="utf-8"))
SOURCES = ROOT / "services" / "paceline"


def symbols(path: Path) -> set[str]:
    """Functions and classes of a module, methods as `Class.method`."""
    top = [each for each in ast.parse(path.read_text(encoding="utf-8")).body if hasattr(each, "name")]
    methods = {f"{each.name}.{inner.name}" for each in top for inner in each.body if hasattr(inner, "name")}
    return {each.name for each in top} | methods


@pytest.mark.parametrize("question", PLACES)
def test_a_newcomer_finds_it_there(question: str) -> None:
    file, symbol = PLACES[question].split()
    assert symbol in symbols(SOURCES / file)
    folder, _, name = file.rpartition("/")
    section = (DOCS / "modules.md").read_text(encoding="utf-8").partition(f"## {folder}/\n")[2].partition("\n## ")[0]
    assert f"| `{name}` |" in section, "the page of modules does not have it"


def test_there_are_twenty_five_questions() -> None:
    assert len(PLACES) == 25
