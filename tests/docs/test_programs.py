"""The checks of the docs' commands find what would not work."""

from __future__ import annotations

from pathlib import Path

import helm_python
import pytest

from tests.docs.blocks import commands
from tests.docs.programs import check

pytestmark = pytest.mark.full


class Nobody:
    """No fleet: what is checked here must fail before one is asked."""


def check_line(line: str, folder: Path) -> None:
    for command in commands(line, folder, {"KEY": "k"}):
        check(command, Nobody(), folder)  # type: ignore[arg-type]


def test_a_shell_block_is_read_as_bash_reads_it(tmp_path: Path) -> None:
    loop = 'for tier in a "b c"; do docker build -t "$tier" . && kill -HUP 7; done  # twice\n'
    pipe = "PACELINE_X=1 curl \\\n  -d '{\n}' u | jq .\n"
    found = commands(loop + pipe, tmp_path, {})
    assert [each.words for each in found[:4]] == [
        ("docker", "build", "-t", "a", "."),
        ("kill", "-HUP", "7"),
        ("docker", "build", "-t", "b c", "."),
        ("kill", "-HUP", "7"),
    ]
    piped = {each.words: dict(each.variables) for each in found[4:]}
    assert piped == {("curl", "-d", "{\n}", "u"): {"PACELINE_X": "1"}, ("jq", "."): {}}


def test_what_bash_cannot_read_is_found(tmp_path: Path) -> None:
    for line in ("make up 'ARGS=", "for x in 1; do ls"):
        with pytest.raises(ValueError, match="bash says"):
            commands(line, tmp_path, {})


def test_a_command_that_its_own_parser_refuses_is_found(tmp_path: Path) -> None:
    for line in (
        "paceline up --num-drafter 2",
        "paceline upp",
        "make up ARGS='--no-such-flag'",
        "python -m loadtest chaos --no-such-flag 1",
    ):
        with pytest.raises(SystemExit):
            check_line(line, tmp_path)


def test_what_is_not_there_is_found(tmp_path: Path) -> None:
    for line in (
        "make no-such-target",
        "PACELINE_NO_SUCH=1 paceline up",
        "pytest tests/no-such-folder",
        "python -m tests.no_such_module",
        "pip install 'paceline[no-such-extra]'",
        "no-such-program",
    ):
        with pytest.raises(AssertionError):
            check_line(line, tmp_path)


def test_a_value_that_the_chart_does_not_have_is_found(tmp_path: Path) -> None:
    with pytest.raises(helm_python.HelmValuesError, match="replica"):
        check_line("helm install paceline k8s/paceline --set drafter.replica=2", tmp_path)
