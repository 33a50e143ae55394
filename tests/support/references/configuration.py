"""Every flag of every command, as docs/configuration.md."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any

from paceline import cli
from paceline.service import config
from paceline.verifier.config import Speculation
from paceline.vllm.settings import TierSettings
from tests.support.commands import Asked, asked
from tests.support.references.tables import WRITTEN_BY, code, table

HEAD = f"""# Configuration

Every flag of every command, its environment variable and its default. {WRITTEN_BY}

* A flag wins over its environment variable. A flag that may be repeated is a list with commas in its variable.
* A yes-or-no flag has a negative form: `--drafter` and `--no-drafter`. Its variable takes true or false.
* A bad value ends the command at start: one line names the flag, the value and the limit.
* Files and the chart's `settings` use the same names without the dashes.
"""
# Commands whose flags depend on another argument.
FURTHER = ("models fetch",)
WITHOUT_FLAGS = frozenset({"models"})
SECTIONS = {
    "The keys of `--speculative-config`": (
        "JSON that `paceline up` and `paceline verifier` take. Keys of vLLM's that have a meaning here have the same "
        "one. [How speculation works](speculation.md).",
        Speculation,
    ),
    "The section `paceline` of vLLM's `--additional-config`": (
        "For the drafter tier under `vllm serve`. [Use with vLLM](vllm.md).",
        TierSettings,
    ),
}


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_sections())


def _sections() -> Iterator[str]:
    for command, what in cli.COMMANDS.items():
        if command not in WITHOUT_FLAGS:
            yield from _of_command(command, f"{what[0].upper()}{what[1:]}.")
    for line in FURTHER:
        yield from _of_command(line, "")
    for title, (said, config_class) in SECTIONS.items():
        rows = [(code(each.name), _default(each), _meaning(each)) for each in config._options(config_class)]
        yield f"\n## {title}\n\n{said}\n\n" + table(("key", "default", "meaning"), rows)


def _of_command(line: str, said: str) -> Iterator[str]:
    found = asked([*line.split(), "--help"], parse=False)
    yield f"\n## `paceline {line}`\n"
    if said:
        yield f"\n{said}\n"
    yield from _of_parser(line, found)


def _of_parser(line: str, found: Asked) -> Iterator[str]:
    if found.config_class is not None:
        rows = [
            (code(each.flag), code(each.variable), _default(each), _meaning(each))
            for each in config._options(found.config_class)
        ]
        yield "\n" + table(("flag", "variable", "default", "meaning"), rows)
        return
    commands = [each for each in found.parser._actions if isinstance(each, argparse._SubParsersAction)]
    for action in commands:
        for name, parser in action.choices.items():
            yield f"\n### `paceline {line} {name}`\n"
            yield from _of_parser(f"{line} {name}", Asked(parser=parser, config_class=None, values=None))
    rows = [_row(each) for each in found.parser._actions if each not in commands and each.dest != "help"]
    if rows:
        yield "\n" + table(("flag", "default", "meaning"), rows)


def _row(action: argparse.Action) -> tuple[str, str, str]:
    default = "" if action.default in (None, (), []) or action.default is False else code(str(action.default))
    name = action.option_strings[-1] if action.option_strings else action.dest.upper()
    said = re.sub(r" \(default: %\(default\)s\)$", "", action.help or "").replace("%(default)s", str(action.default))
    return code(name), "required" if action.required else default, said.replace("%%", "%")


def _default(option: Any) -> str:
    if option.required:
        return "required"
    empty = option.default in (None, (), "")
    return "" if empty else code(str(option.default).lower() if option.base_type is bool else str(option.default))


def _meaning(option: Any) -> str:
    limits = option.wanted if option.base_type is not bool and option.wanted not in ("text", "a path") else ""
    repeated = "may be repeated" if option.repeated else ""
    more = "; ".join(filter(None, (limits, repeated)))
    return option.setting.help + (f" ({more})" if more else "")
