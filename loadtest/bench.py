"""Shared parts of all benches: their command line, their table, and the last line with all figures."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import uvloop

MIB = 1024 * 1024
# How requests choose tokens: fields of theirs, and flags.
SAMPLING = ("temperature", "top_p", "top_k")
LEAST_WIDTH = 9
WIDEST = {"avx512_bf16": "AVX-512 and BF16", "avx512f": "AVX-512", "fma": "AVX2"}


def bench_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A bench's parser; its help is the docstring of the module, line by line."""
    return argparse.ArgumentParser(prog=name, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_round_flags(parser: argparse.ArgumentParser, least: int, most: int) -> None:
    """Adds `--rounds` and `--most-rounds` with these defaults."""
    parser.add_argument("--rounds", type=int, default=least, help=f"least rounds (default {least})")
    parser.add_argument("--most-rounds", type=int, default=most, help=f"most rounds (default {most})")


def add_choice_flags(parser: argparse.ArgumentParser) -> None:
    """Adds how many ids the models have, and how requests choose among them."""
    parser.add_argument("--vocab", type=int, default=0, help="give both models so many token ids (default: as shipped)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default 0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="(default 1, off)")
    parser.add_argument("--top-k", type=int, default=0, help="(default 0, off)")


def sampling_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of requests that `add_choice_flags` has flags for."""
    return {name: getattr(arguments, name) for name in SAMPLING}


def run(parser: argparse.ArgumentParser, measure: Callable[[argparse.Namespace], Awaitable[bool]]) -> NoReturn:
    """Parses the command line and runs a bench; exit status 0 if it is met."""
    arguments = parser.parse_args()

    async def measured() -> bool:
        return await measure(arguments)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        raise SystemExit(0 if runner.run(measured()) else 1)


class Table:
    """Prints rows as they come, under the names of their figures; the members of an object stand side by side."""

    def __init__(self) -> None:
        self._widths: list[int] = []

    def add(self, row: Mapping[str, Any]) -> None:
        """Prints a row; the first one prints the names too, and all rows have the same."""
        flat = dict(_flat(row))
        cells = [_cell(value) for value in flat.values()]
        if not self._widths:
            self._widths = [max(LEAST_WIDTH, len(name), len(cell)) for name, cell in zip(flat, cells, strict=True)]
            self._print(list(flat))
        self._print(cells)

    def _print(self, cells: list[str]) -> None:
        line = "  ".join(cell.rjust(width) for cell, width in zip(cells, self._widths, strict=True))
        print(line, flush=True)


def show(rows: Iterable[Mapping[str, Any]]) -> None:
    """Prints a table of rows that are all there."""
    table = Table()
    for row in rows:
        table.add(row)


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in row.items():
        title = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{title} ")
        else:
            yield title, value


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "NO"
        case float():
            return f"{value:.7g}"
        case list() | tuple():
            return " ".join(map(_cell, value))
        case _:
            return str(value)


def report(bench: str, *, ok: bool, **figures: Any) -> bool:
    """Prints the last line, one JSON object; returns `ok`."""
    print(json.dumps({"bench": bench, "machine": machine(), **figures, "ok": ok}))
    return ok


def machine() -> str:
    """This machine in a few words, with the widest instructions that our products can use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    facts = {name.strip(): value.strip() for name, value in named.items()}
    flags = facts.get("flags", "").split()
    widest = next((name for flag, name in WIDEST.items() if flag in flags), "no AVX2 and FMA")
    return f"{os.cpu_count()} cores, {facts.get('model name', 'unknown CPU')}, {widest}"
