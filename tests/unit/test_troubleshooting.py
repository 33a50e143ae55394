"""`docs/troubleshooting.md` quotes messages that the code really has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import paceline

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
SOURCES = Path(paceline.__file__).parent
# Messages are sentences; what is shorter is a flag, a path or a code.
MESSAGE = re.compile(r"`([^`]+ [^`]+ [^`]+)`")
GAP = "…"


def test_every_message_on_the_page_is_one_of_the_code() -> None:
    texts = "\0".join(text for path in sorted(SOURCES.rglob("*.py")) for text in texts_of(path))
    pieces = {piece.strip(" :;(),") for message in messages() for piece in message.split(GAP)} - {""}
    assert sorted(piece for piece in pieces if piece not in texts) == []


def messages() -> list[str]:
    """What stands in the tables as a message."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    found = [message for row in rows for message in MESSAGE.findall(row.rpartition("|")[0].rpartition(" | ")[0])]
    assert len(found) > 50, "the page has lost its tables"
    return [message for message in found if not message.startswith("curl ")]


def texts_of(path: Path) -> list[str]:
    """All text in a source file; parts of one literal are joined."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
