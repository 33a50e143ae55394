"""Tables of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WRITTEN_BY = "`make references` makes this page from the code, and a test compares the two."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that ends with a line feed; strokes within cells are escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        "|" + "|".join(f" {text} " if (text := _cell(cell)) else " " for cell in line) + "|\n" for line in lines
    )


def code(text: str) -> str:
    """Text as code; nothing for nothing."""
    return f"`{text}`" if text else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("\\|", "|").replace("|", "\\|")
