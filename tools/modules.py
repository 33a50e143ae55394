"""Prints every module of the package with the first sentence of its docstring: `make modules`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "services" / "paceline"
GENERATED = SOURCES / "rpc"


def lines() -> Iterator[str]:
    """Yields `path: sentence` for every module, folder by folder."""
    for path in sorted(SOURCES.rglob("*.py"), key=lambda path: (path.parent.as_posix(), path.name)):
        if path.name != "__init__.py" and GENERATED not in path.parents:
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            sentence = " ".join(docstring.partition("\n\n")[0].split())
            yield f"{path.relative_to(SOURCES).as_posix()}: {sentence}"


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in lines())
