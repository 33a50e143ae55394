"""`docs/moving-from-vllm.md` names flags and fields that are ours, and tells rightly which of vLLM's are not."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from paceline.drafter.config import DrafterConfig
from paceline.gateway.api.openai.bodies import ChatBody, CompletionBody
from paceline.gateway.config import GatewayConfig
from paceline.verifier.config import Speculation, VerifierConfig

PAGE = Path(__file__).parents[2] / "docs" / "moving-from-vllm.md"
SERVICES = (GatewayConfig, VerifierConfig, DrafterConfig)


def test_flags_of_ours_are_there() -> None:
    known = {f"--{field.name.replace('_', '-')}" for each in SERVICES for field in dataclasses.fields(each)}
    named = {flag for row in rows("Flags") for flag in re.findall(r"(?<![=\w-])--[a-z][a-z-]*", row[1])}
    assert len(named) > 15
    assert named <= known


def test_keys_of_ours_are_there() -> None:
    ours = " ".join(row[1] for row in rows("Speculation settings"))
    assert {"acceptance", "eagle3_model", "medusa_model"} <= set(re.findall(r"`(\w+)`", ours))
    assert set(re.findall(r"`(\w+_model)`", ours)) <= {field.name for field in dataclasses.fields(Speculation)}


def test_fields_are_served_ignored_or_refused_as_the_page_says() -> None:
    bodies = (ChatBody, CompletionBody)
    served = {name for body in bodies for name in body.model_fields}
    refused = {name for body in bodies for name in body.not_served}
    told: dict[str, set[str]] = defaultdict(set)
    for row in rows("Request fields"):
        told[row[2]] |= set(re.findall(r"`(\w+)`", row[0]))
    assert told["refused by name"]
    assert told["refused by name"] <= refused
    assert told["ignored and named"]
    assert told["ignored and named"].isdisjoint(served | refused)
    assert told["served, as older vLLM did"]
    assert told["served, as older vLLM did"] <= served


def rows(heading: str) -> Iterator[list[str]]:
    """Cells of the table below a heading, without its head."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].partition("\n## ")[0]
    found = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    yield from found[2:]
