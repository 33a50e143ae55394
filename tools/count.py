"""Counts lines, classes, functions and modules by feature: `make count`; of another checkout with its folder."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parents[1]
# Folders whose parts are features of their own.
SPLIT = ("gateway", "gateway/api", "engine", "engine/backends", "verifier")


class Count(NamedTuple):
    """Sums over modules."""

    lines: int = 0
    classes: int = 0
    functions: int = 0
    modules: int = 0

    def plus(self, other: Count) -> Count:
        return Count(*map(sum, zip(self, other, strict=True)))


def count(path: Path) -> Count:
    """Counts one module."""
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    functions = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
    return Count(text.count("\n"), sum(isinstance(node, ast.ClassDef) for node in nodes), functions, 1)


def feature(path: Path) -> str:
    """Names the feature of a module by its folder, relative to the package."""
    folder = path.parent
    while folder.parent.as_posix() not in (".", *SPLIT):
        folder = folder.parent
    return folder.as_posix() if folder != Path() else path.stem


def table(root: Path) -> Iterator[tuple[str, Count]]:
    """Yields the sums of each feature, of the package without generated code, and of the folders beside it."""
    package, features = root / "services" / "paceline", defaultdict[str, Count](Count)
    for path in sorted(package.rglob("*.py")):
        if (package / "rpc") not in path.parents:
            name = feature(path.relative_to(package))
            features[name] = features[name].plus(count(path))
    yield from sorted(features.items())
    yield "services", Count(*map(sum, zip(*features.values(), strict=True)))
    for other in ("tests", "loadtest", "training"):
        counts = [count(path) for path in sorted((root / other).rglob("*.py"))]
        yield other, Count(*map(sum, zip(*counts, strict=True)))


if __name__ == "__main__":
    checkout = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    sys.stdout.write(f"{'feature':28}{'lines':>8}{'classes':>9}{'functions':>11}{'modules':>9}\n")
    sys.stdout.writelines(
        f"{name:28}{sums.lines:8,}{sums.classes:9,}{sums.functions:11,}{sums.modules:9,}\n"
        for name, sums in table(checkout)
    )
