"""Messages name the command as it was called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.service.config import as_called

ENV = os.environ | {"PYTHONPATH": "services"}


def refused(*command: str) -> str:
    """What a call with an unknown flag says on stderr."""
    ended = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 2
    return ended.stderr


def test_a_module_names_itself() -> None:
    assert refused(sys.executable, "-m", "paceline", "up", "--nope").startswith("python -m paceline up: error: ")
    assert refused(sys.executable, "-m", "paceline.gateway", "--nope").startswith("python -m paceline.gateway: error: ")


def test_a_program_on_the_search_path_is_named_alone_and_one_beside_it_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "paceline"
    program.touch(mode=0o755)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert as_called("paceline up") == "paceline up"
    monkeypatch.setenv("PATH", "/nowhere")
    assert as_called("paceline up") == f"{program} up"


def test_another_program_takes_the_name_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/pytest"])
    assert as_called("paceline drain") == "paceline drain"
