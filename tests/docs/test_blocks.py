"""Code blocks of README and docs run, or are checked as far as they can be here."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import helm_python
import pytest
import yaml

from paceline.cluster import fleet_file
from paceline.cluster.spec import FleetSpec
from paceline.core.tree import DraftTree
from paceline.engine.source_interface import Turn
from paceline.forest import Forest
from paceline.rpc.v1 import gateway_pb2
from paceline.service import config
from tests.docs.blocks import Block, blocks, commands
from tests.docs.demo import Demo
from tests.docs.programs import check
from tests.support.trees import seen
from tests.unit.k8s.chart import CHART

BLOCKS = list(blocks())
# Pictures and outputs.
SHOWN = ("", "text", "console", "mermaid", "diff")
SHELLS = ("bash", "sh", "shell")
PYTHON_S = 60.0
# Variables and names that pages assume.
VARIABLES = {"KEY": "pl-0", "HOST": "10.0.0.7", "REGISTRY": "registry.example", "tier": "gateway"}
GIVEN: Mapping[str, Any] = {
    "key": None,
    "request": gateway_pb2.GatewayGenerateRequest(prompt="def f(", sampling={"max_tokens": 8}),
}


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def test_every_block_says_in_which_known_language_it_is() -> None:
    known = {*SHOWN, *SHELLS, "python", "yaml", "json", "toml"}
    assert [f"{block}: {block.language}" for block in BLOCKS if block.language not in known] == []


@pytest.mark.full
@pytest.mark.parametrize("page", sorted({block.page for block in of(*SHELLS)}))
def test_the_commands_of_a_page_would_work(page: str, demo: Demo, tmp_path: Path) -> None:
    for block in of(*SHELLS):
        if block.page == page:
            found = commands(block.text, tmp_path, VARIABLES)
            assert found, f"{block} starts nothing"
            for command in found:
                check(command, demo, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("block", of("python"), ids=str)
def test_a_python_block_runs(block: Block, demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = re.sub(r"[\w.-]+:80[0-9]0\b", demo.address, block.text)
    text = re.sub(r"[\w.-]+:80[0-9]1\b", demo.grpc_address, text)
    program = compile(text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    names = {"__name__": "__main__", **GIVEN}
    if program.co_flags & inspect.CO_COROUTINE:
        asyncio.run(asyncio.wait_for(eval(program, names), PYTHON_S))
    else:
        exec(program, names)


def test_the_draft_method_of_its_page_guesses_what_last_followed() -> None:
    (source,) = (block for block in of("python") if block.page == "docs/add-a-method-or-rule.md")
    names: dict[str, Any] = {"__name__": "bigram"}
    exec(source.text, names)
    tokens = [5, 6, 7, 5]
    tree = DraftTree(Forest([names["BigramSource"].name]), tokens)
    turn = Turn(follower=SimpleNamespace(tokens=tokens), tree=tree, limit=4, least=0.1)
    names["BigramSource"]().grow([turn])
    nodes = seen(tree).below()
    assert [node.token_id for node in nodes] == [6, 7, 5]
    assert [node.survival for node in nodes] == pytest.approx([0.5, 0.25, 0.125])


def test_json_and_toml_blocks_are_what_they_say() -> None:
    readers: Mapping[str, Callable[[str], Any]] = {"json": json.loads, "toml": tomllib.loads}
    for block in of(*readers):
        assert readers[block.language](block.text), block


def test_yaml_blocks_are_yaml_and_what_looks_like_a_file_of_ours_is_read_as_one() -> None:
    for block in of("yaml"):
        for document in yaml.safe_load_all(block.text):
            assert document, block
            readers = [read for names, read in files_of_ours().items() if is_one(document, names)]
            errors = [error for read in readers if (error := refusal(read, document))]
            assert not readers or len(errors) < len(readers), (block, errors)


def files_of_ours() -> dict[frozenset[str], Callable[[dict[str, Any]], object]]:
    """How files of ours are read, by the names that stand at their top."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    fleet = frozenset({fleet_file.RAY, *fleet_file.NAMES})
    return {frozenset(values): as_values, fleet: as_fleet}


def is_one(document: Any, names: frozenset[str]) -> bool:
    return isinstance(document, dict) and document.keys() <= names


def as_fleet(document: dict[str, Any]) -> object:
    return config.load(FleetSpec, [], {}, "", "", fleet_file.parse_fleet(document, "")[0])


def as_values(document: dict[str, Any]) -> object:
    """By the schema alone: a block may be a part of a file."""
    with helm_python.Chart.load(CHART) as chart:
        return chart.validate_schema(document)


def refusal(read: Callable[[dict[str, Any]], object], document: dict[str, Any]) -> str:
    try:
        read(document)
    except Exception as error:  # noqa: BLE001 - each reader has errors of its own
        return f"{type(error).__name__}: {error}"
    return ""
