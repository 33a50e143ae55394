"""What a command line of `paceline` means, found out without running the command.

The command runs up to where it has read its arguments; there it is stopped. So what is asked is the very parser that
users meet.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from paceline import cli
from paceline.service import config


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How a command reads its arguments.

    Attributes:
        parser: Of argparse.
        config_class: What is built from flags and environment; None: the command reads flags alone.
        values: What was read.
    """

    parser: argparse.ArgumentParser
    config_class: type[Any] | None
    values: Any


class _StoppedError(BaseException):
    """The arguments are read; no handler of the command's own takes it for an error."""


def asked(command_line: Sequence[str], *, parse: bool = True, run: Callable[[list[str]], object] = cli.main) -> Asked:
    """Reads the arguments of a command, such as `["up", "--num-drafters", "2"]`.

    Args:
        command_line: Without the program's name.
        parse: Whether the arguments are read; if not, the parser alone is found, whatever the arguments lack.
        run: Runs the command line.

    Raises:
        SystemExit: The command refuses them, and has said so on stderr; or it has no arguments to read.
    """
    found: list[Asked] = []
    with _stopping(found, parse):
        try:
            run(list(command_line))
        except _StoppedError:
            return found[0]
    raise SystemExit(f"paceline {' '.join(command_line)} ended without reading arguments")


@contextmanager
def _stopping(found: list[Asked], parse: bool) -> Iterator[None]:
    """Stops commands where they have read their arguments, which are put into `found`."""
    real_parse, real_load = argparse.ArgumentParser.parse_args, config.load
    classes: list[type[Any]] = []

    def load(
        config_class: type[Any], argv: Sequence[str], environ: Any, prog: str, description: str, *more: Any
    ) -> Any:
        classes.append(config_class)
        parser = config._parser(config._options(config_class), prog, description)
        values = real_load(config_class, argv, {}, prog, description, *more) if parse else None
        found.append(Asked(parser=parser, config_class=config_class, values=values))
        raise _StoppedError

    def parse_args(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        values = real_parse(parser, args, namespace) if parse else None
        if classes:
            return values
        found.append(Asked(parser=parser, config_class=None, values=values))
        raise _StoppedError

    with patch.object(argparse.ArgumentParser, "parse_args", parse_args), patch.object(config, "load", load):
        yield
