"""The command lines of benches."""

from __future__ import annotations

import argparse


def bench_parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A bench's parser; its help is the docstring of the module, line by line."""
    return argparse.ArgumentParser(prog=name, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_round_flags(parser: argparse.ArgumentParser, least: int, most: int) -> None:
    """Adds `--rounds` and `--most-rounds` with these defaults."""
    parser.add_argument("--rounds", type=int, default=least, help=f"least rounds (default {least})")
    parser.add_argument("--most-rounds", type=int, default=most, help=f"most rounds (default {most})")
