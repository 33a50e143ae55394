"""One sentence a module, taken from its docstring: `python -m tests.support.module_table` writes `docs/modules.md`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "services" / "paceline"
TABLE = ROOT / "docs" / "modules.md"
HEAD = """# What each module does

The first sentence of every module, folder by folder. `python -m tests.support.module_table` writes this page; a test
holds it against the sources. [How a request passes through them](life-of-a-request.md).
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
        rows = [(path.name, sentence(path)) for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
        if rows:
            yield f"\n## {'paceline' if name == '.' else name}/\n\n| module | what it is for |\n| --- | --- |\n"
            yield from (f"| `{file}` | {said} |\n" for file, said in rows)


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line.

    Raises:
        ValueError: It has none.
    """
    said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not said:
        raise ValueError(f"{path}: a module needs a docstring")
    return " ".join(said.split("\n\n")[0].split()).rstrip(".").replace("|", "\\|")


if __name__ == "__main__":
    TABLE.write_text(page(), encoding="utf-8")
