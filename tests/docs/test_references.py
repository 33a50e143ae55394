"""The reference pages of docs/ say what the code says."""

from __future__ import annotations

import re

import pytest

from paceline.rpc.v1 import common_pb2, drafter_pb2, gateway_pb2, verifier_pb2
from tests.support.references import DOCS, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_page_is_what_the_code_says(name: str) -> None:
    shown = (DOCS / name).read_text(encoding="utf-8")
    assert shown == PAGES[name](), "write it anew: python -m tests.support.references"


@pytest.mark.parametrize("module", [common_pb2, drafter_pb2, gateway_pb2, verifier_pb2])
def test_the_page_of_grpc_has_every_field_with_its_meaning(module: object) -> None:
    page = (DOCS / "grpc-api.md").read_text(encoding="utf-8")
    for message in module.DESCRIPTOR.message_types_by_name.values():  # type: ignore[attr-defined]
        section = page.partition(f"### {message.name}\n")[2].partition("\n### ")[0]
        rows = dict(re.findall(r"^\| `(\w+)` \| (\d+) \| [^|]+ \| \S.* \|$", section, re.MULTILINE))
        assert rows == {field.name: str(field.number) for field in message.fields}, message.name
