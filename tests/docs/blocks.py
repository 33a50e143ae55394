"""Code blocks of README and docs, and the commands in those of the shell.

A shell block runs in a bash that finds no program and records each command with its arguments instead. So quotes,
loops, pipes and variables mean what they mean to a reader who pastes the block.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cluster.checkpoints import DEMO_TARGET
from tests.support.site import ROOT, pages

SHELL_S = 10.0
_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[^\s`]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
_MODEL = re.compile(r"""model=["']([\w./-]+)["']""")
# Programs of .venv are named with or without their folder.
_BIN = re.compile(r"(?:\./)?\.venv/bin/")
_RECORDER = r"""
command_not_found_handle() {
  local pairs=() name
  for name in ${!PACELINE_@}; do pairs+=("$name=${!name}"); done
  # In one piece: the commands of a pipe run side by side.
  printf '%s\0' "$#" "$@" "${#pairs[@]}" "${pairs[@]}" >> "$RECORD"
}
for builtin in cd kill source wait; do eval "$builtin() { command_not_found_handle $builtin \"\$@\"; }"; done
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block.

    Attributes:
        page: Its page, from the top of the checkout.
        line: Where it begins there, from 1.
        language: As its fence names it; empty for a picture or an output.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        """Where to find it."""
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a shell would start.

    Attributes:
        words: Program and arguments.
        variables: The PACELINE_ variables of its environment.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str]


def blocks() -> Iterator[Block]:
    """Every block of every page, in the pages' order."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for found in _FENCE.finditer(text):
            indent = len(found["indent"])
            yield Block(
                page=page.relative_to(ROOT).as_posix(),
                line=text.count("\n", 0, found.start()) + 1,
                language=found["language"],
                text="".join(line[indent:] or "\n" for line in found["text"].splitlines(keepends=True)),
            )


def models_asked_for() -> list[str]:
    """Returns the names by which Python blocks ask for a model, except its own."""
    named = {name for block in blocks() if block.language == "python" for name in _MODEL.findall(block.text)}
    return sorted(named - {DEMO_TARGET.name})


def commands(script: str, folder: Path, variables: Mapping[str, str]) -> list[Command]:
    """The commands that a script would start, in order.

    Args:
        script: For bash.
        folder: Where it runs; its redirections write there.
        variables: Set before it.

    Raises:
        ValueError: bash refuses the script.
    """
    record = folder / ".commands"
    record.unlink(missing_ok=True)
    ended = subprocess.run(
        ["/bin/bash", "--norc", "--noprofile", "-c", _RECORDER + _BIN.sub("", script)],
        cwd=folder,
        env={**variables, "PATH": os.devnull, "RECORD": str(record)},
        capture_output=True,
        text=True,
        timeout=SHELL_S,
        check=False,
    )
    if ended.returncode or ended.stderr:
        raise ValueError(f"bash says {ended.stderr.strip() or ended.returncode}")
    return list(_read(record.read_bytes().decode().split("\0")[:-1])) if record.is_file() else []


def _read(fields: Sequence[str]) -> Iterator[Command]:
    place = 0
    while place < len(fields):
        words_end = place + 1 + int(fields[place])
        variables_end = words_end + 1 + int(fields[words_end])
        pairs = (field.partition("=") for field in fields[words_end + 1 : variables_end])
        yield Command(words=tuple(fields[place + 1 : words_end]), variables={name: value for name, _, value in pairs})
        place = variables_end
