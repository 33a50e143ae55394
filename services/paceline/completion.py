"""`paceline completion SHELL`: completions of commands and their flags, for a shell to load.

Flags come from the classes that the commands read them with, so there is nothing to keep in step.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import shtab

from paceline.cli import COMMANDS, PROG
from paceline.service.config import add_flags, parse, setting

SHELLS = "bash", "zsh", "fish"
DESCRIPTION = """Prints completions of this command for a shell, which loads them from a file:
~/.local/share/bash-completion/completions/paceline for bash, ~/.config/fish/completions/paceline.fish for fish, and
_paceline in a folder of $fpath for zsh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionConfig:
    """Flags of `paceline completion`."""

    shell: str = setting(help="Shell that loads them.", choices=SHELLS)


# Modules and classes of flags, by the words of a command.
FLAGS = {
    ("up",): ("paceline.cluster.spec", "FleetSpec"),
    ("gateway",): ("paceline.gateway.config", "GatewayConfig"),
    ("verifier",): ("paceline.verifier.config", "VerifierConfig"),
    ("drafter",): ("paceline.drafter.config", "DrafterConfig"),
    ("drain",): ("paceline.cluster.drain", "DrainConfig"),
    ("generate",): ("paceline.client.generate", "GenerateConfig"),
    ("demo",): ("paceline.cluster.demo", "DemoConfig"),
    ("rehearse",): ("paceline.client.rehearse", "RehearseConfig"),
    ("plan",): ("paceline.planning.__main__", "PlanConfig"),
    ("models", "fetch"): ("paceline.cluster.models", "FetchConfig"),
    ("dev-ca",): ("paceline.service.dev_ca", "DevCaConfig"),
    ("key",): ("paceline.gateway.access.keys", "KeyConfig"),
    ("completion",): ("paceline.completion", "CompletionConfig"),
}


def main(argv: Sequence[str]) -> None:
    """Entry point of `paceline completion`."""
    config = parse(CompletionConfig, argv, os.environ, f"{PROG} completion", DESCRIPTION, first="shell")
    sys.stdout.write(shtab.complete(described(), config.shell))


def described() -> argparse.ArgumentParser:
    """Returns a parser of all commands and flags, to be looked at."""
    parser = argparse.ArgumentParser(PROG)
    commands = parser.add_subparsers()
    for command, what in COMMANDS.items():
        each = commands.add_parser(command, help=what)
        if (command,) in FLAGS:
            _describe(each, (command,))
            continue
        actions = each.add_subparsers()
        for words in FLAGS:
            if words[0] == command:
                # Without a help text its flags are left out.
                _describe(actions.add_parser(words[-1], help=what), words)
    return parser


def _describe(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> None:
    module, name = FLAGS[words]
    for action in add_flags(parser, getattr(importlib.import_module(module), name)):
        if action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
