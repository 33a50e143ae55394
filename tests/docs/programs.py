"""What is checked of a command in the docs, by its program.

Paceline's commands are read by their own parsers, and requests are sent to a fleet. Other programs cannot run here (a
cluster, an image builder, another engine): the files of the checkout that they name must exist, and settings of ours
must be known.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import httpx
import yaml
from loadtest import __main__ as loadtest

from paceline import cli
from paceline.service import config
from paceline.vllm.settings import settings_of
from tests.docs.blocks import Command, commands
from tests.docs.demo import Demo
from tests.support.commands import asked
from tests.support.site import ROOT
from tests.unit.k8s.chart import render

OUR_FOLDERS = ("docs/", "k8s/", "loadtest/", "protos/", "services/", "tests/")
# They start the command after this number of words.
BEFORE = {"sudo": 1, "nohup": 1, "exec": 1, "time": 1, "taskset": 3, "nice": 3}
# They cannot run here, or have nothing to do with Paceline.
OTHERS = frozenset({
    "apt-get", "cat", "cd", "claude", "cp", "docker", "export", "git", "grep", "head", "helm", "jq", "kill", "kubectl",
    "ls", "mkdir", "npx", "oc", "open", "podman", "pre-commit", "ray", "rm", "sleep", "source", "ssh", "tail", "test",
    "touch", "uv", "wait", "watch",
})  # fmt: skip
OF_MAKE = frozenset({"ARGS", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS"})
MAKE_S = 30.0
ASK_S = 60.0
# Ports of the services as `paceline up` starts them.
GATEWAY, METRICS = re.compile("80[0-9]0"), {8102: "verifier", 8202: "drafter"}


def check(command: Command, demo: Demo, folder: Path) -> None:
    """Checks one command.

    Args:
        command: As a shell would start it.
        demo: The fleet that gets its requests.
        folder: Where it writes.

    Raises:
        AssertionError, SystemExit: It would not work; the message, or stderr, says why.
    """
    program, *arguments = command.words
    if program in BEFORE:
        rest = command.words[BEFORE[program] :]
        return check(Command(words=rest, variables=command.variables), demo, folder)
    _check_files(arguments)
    special: dict[str, Callable[[], None]] = {
        "paceline": lambda: check_ours(arguments, command, demo),
        "make": lambda: check_make(arguments, demo, folder),
        "python": lambda: check_python(arguments, command, demo),
        "pytest": lambda: None,
        "pip": lambda: check_pip(arguments),
        "curl": lambda: check_curl(arguments, demo),
        "helm": lambda: check_helm(arguments),
        "vllm": lambda: check_vllm(arguments),
    }
    if program.startswith("paceline-"):
        return check_ours([program.removeprefix("paceline-"), *arguments], command, demo)
    if program in special:
        return special[program]()
    assert program in OTHERS, f"{program}: no program that tests/docs/programs.py knows"
    return None


def check_ours(arguments: Sequence[str], command: Command, demo: Demo) -> None:
    """Reads the arguments with the command's own parser; `generate` also runs."""
    if arguments in (["--help"], ["--version"]) or arguments[1:] == ["--help"]:
        assert arguments[0] in ("--help", "--version", *cli.COMMANDS)
        return
    found = asked(list(arguments))
    if found.config_class is not None:
        known = {each.variable for each in config._options(found.config_class)}
        assert set(command.variables) <= known, f"paceline {arguments[0]} reads no {set(command.variables) - known}"
    if arguments[0] == "generate" and found.values.ca_file is None:
        cli.main([*arguments, f"--url={demo.url}"])


def check_make(arguments: Sequence[str], demo: Demo, folder: Path) -> None:
    """Checks what make would start."""
    make = shutil.which("make")
    assert make is not None, "make is needed"
    planned = subprocess.run(
        [make, "-n", "--no-print-directory", *arguments],
        cwd=ROOT,
        # Without the settings of a `make test ARGS=...` around these tests.
        env={name: value for name, value in os.environ.items() if name not in OF_MAKE},
        capture_output=True,
        text=True,
        timeout=MAKE_S,
    )
    assert planned.returncode == 0, planned.stderr
    lines = planned.stdout.replace("\\\n", " ").splitlines()
    ours = [line for line in lines if re.match(r"\.venv/bin/(paceline|python -m|pytest)", line)]
    for each in commands("\n".join(ours), folder, {}):
        check(each, demo, folder)


def check_python(arguments: Sequence[str], command: Command, demo: Demo) -> None:
    """A module must be there, and one of ours takes the arguments; a file must be there."""
    if arguments[:1] != ["-m"]:
        return
    module, rest = arguments[1], list(arguments[2:])
    if module == "loadtest" and rest:
        asked(rest, run=_bench)
    elif module == "paceline" or (module.startswith("paceline.") and module.removeprefix("paceline.") in cli.COMMANDS):
        check_ours([*module.split(".")[1:], *rest], command, demo)
    else:
        assert find_spec(module) is not None, f"there is no module {module}"


def _bench(arguments: list[str]) -> None:
    with patch.object(sys, "argv", ["loadtest", *arguments]):
        loadtest.main()


def check_pip(arguments: Sequence[str]) -> None:
    """Extras of ours must be declared."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for argument in arguments:
        if found := re.match(r"(?:paceline|\.)\[([\w,-]+)\]", argument):
            assert set(found[1].split(",")) <= project["optional-dependencies"].keys(), f"no such extra: {argument}"


def check_curl(arguments: Sequence[str], demo: Demo) -> None:
    """Sends the request to the fleet, which must accept it; requests to other servers are only parsed."""
    said = _curl().parse_args(arguments)
    body = json.loads(said.data) if said.data is not None and not said.data.startswith("@") else None
    if isinstance(body, dict) and "model" in body:
        body["model"] = demo.model
    address = urlsplit(said.url)
    base = demo.url if GATEWAY.fullmatch(str(address.port)) else demo.metrics_url(METRICS.get(address.port or 0, ""))
    if not base:
        return
    headers = dict(header.split(": ", 1) for header in said.header)
    method = said.request or ("GET" if body is None else "POST")
    path = address.path + (f"?{address.query}" if address.query else "")
    answer = httpx.request(method, base + path, headers=headers, json=body, timeout=ASK_S)
    assert answer.status_code < 300, f"{said.url}: {answer.status_code} {answer.text}"


def check_helm(arguments: Sequence[str]) -> None:
    """Renders the chart with the given values, which its schema must accept."""
    if not any(argument.rstrip("/").endswith("k8s/paceline") for argument in arguments):
        return
    values: dict[str, Any] = {}
    for flag, given in pairwise(arguments):
        if flag in ("-f", "--values") and (ROOT / given).is_file():
            merge(values, yaml.safe_load((ROOT / given).read_text(encoding="utf-8")))
        elif flag in ("--set", "--set-string"):
            for part in re.split(r"(?<!\\),(?![^{]*\})", given):
                merge(values, _nested(part, text=flag == "--set-string"))
    render(values)


def check_vllm(arguments: Sequence[str]) -> None:
    """JSON of its flags must be JSON, and our section in it must be right."""
    for flag, given in pairwise(arguments):
        if flag == "--additional-config" and "..." not in given:
            settings_of(json.loads(given))
        elif flag == "--speculative-config" and "..." not in given:
            json.loads(given)


def merge(values: dict[str, Any], more: dict[str, Any]) -> None:
    """Lays values over values, as Helm does."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            merge(values[key], value)
        else:
            values[key] = value


def _nested(assignment: str, *, text: bool) -> dict[str, Any]:
    """`a.b=c` as a mapping."""
    name, _, value = assignment.partition("=")
    listed = re.fullmatch(r"\{(.*)\}", value)
    read: Any = value if text else yaml.safe_load(f"[{listed[1]}]" if listed else value)
    for key in reversed(re.split(r"(?<!\\)\.", name)):
        read = {key.replace("\\", ""): read}
    nested: dict[str, Any] = read
    return nested


def _check_files(arguments: Sequence[str]) -> None:
    for argument in arguments:
        path = argument.rpartition("=")[2].partition("::")[0]
        if path.startswith(OUR_FOLDERS):
            assert (ROOT / path).exists(), f"{path} is not there"


def _curl() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="curl")
    parser.add_argument("url")
    parser.add_argument("-H", "--header", action="append", default=[])
    parser.add_argument("-d", "--data", "--json")
    for taken in ("-X/--request", "-o/--output", "-w/--write-out", "--cacert", "--max-time"):
        parser.add_argument(*taken.split("/"))
    for flag in "NsSfikvL":
        parser.add_argument(f"-{flag}", action="store_true", dest=f"flag_{flag}")
    return parser
