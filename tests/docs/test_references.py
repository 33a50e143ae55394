"""The reference pages of docs/ say what the code says."""

from __future__ import annotations

import re

from paceline.rpc.v1 import common_pb2, drafter_pb2, gateway_pb2, verifier_pb2
from tests.support.references import DOCS, PAGES


def test_reference_pages_say_what_the_code_says() -> None:
    old = [name for name, page in PAGES.items() if (DOCS / name).read_text(encoding="utf-8") != page()]
    assert old == [], "run make references"


def test_the_page_of_grpc_has_every_field_with_its_meaning() -> None:
    page = (DOCS / "grpc-api.md").read_text(encoding="utf-8")
    for module in (common_pb2, drafter_pb2, gateway_pb2, verifier_pb2):
        for message in module.DESCRIPTOR.message_types_by_name.values():
            section = page.partition(f"### {message.name}\n")[2].partition("\n### ")[0]
            rows = dict(re.findall(r"^\| `(\w+)` \| (\d+) \| [^|]+ \| \S.* \|$", section, re.MULTILINE))
            assert rows == {field.name: str(field.number) for field in message.fields}, message.name
