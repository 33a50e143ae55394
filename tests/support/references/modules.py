"""One sentence a module, taken from its docstring, as docs/modules.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.support.references.tables import WRITTEN_BY, table

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "services" / "paceline"
HEAD = f"""# What each module does

The first sentence of every module, folder by folder. {WRITTEN_BY}
[How a request passes through them](life-of-a-request.md).
"""
GENERATED = "rpc"


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_sections())


def _sections() -> Iterator[str]:
    folders = sorted({path.parent for path in SOURCES.rglob("*.py")}, key=lambda folder: folder.as_posix())
    for folder in folders:
        name = folder.relative_to(SOURCES).as_posix()
        if name.split("/")[0] == GENERATED:
            continue
        rows = [
            (f"`{path.name}`", sentence(path)) for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"
        ]
        if rows:
            yield f"\n## {'paceline' if name == '.' else name}/\n\n" + table(("module", "what it is for"), rows)


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line.

    Raises:
        ValueError: It has none.
    """
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not said:
        raise ValueError(f"{path}: a module needs a docstring")
    return " ".join(said.split("\n\n")[0].split()).rstrip(".")
