"""The packages that docs/add-a-draft-method.md and docs/add-an-acceptance-rule.md show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page: str) -> dict[str, str]:
    """The `toml` and the `python` block of a page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return dict(re.findall(r"```(toml|python)\n(.*?)```", text, re.DOTALL))


def typical_rule(**options: Any) -> Any:
    """The rule of docs/add-an-acceptance-rule.md."""
    names: dict[str, Any] = {}
    exec(blocks("add-an-acceptance-rule.md")["python"], names)
    return names["Typical"](**options)
