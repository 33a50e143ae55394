"""A side of `turns` names a source tree, and its services run the sources of that tree and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from loadtest.turns import _check_sources, _NotStartedError, _parse

ROOT = Path(__file__).parents[3]


def test_a_side_is_a_tree_and_flags():
    assert _parse(f"{ROOT} --drafter-arg='--draft-width=8' --num-drafters 2") == (
        ROOT,
        ["--drafter-arg=--draft-width=8", "--num-drafters", "2"],
    )


@pytest.mark.parametrize("side", ["", "/tmp", "--draft-width 8"])
def test_what_is_no_source_tree_is_refused_with_what_to_do(side):
    with pytest.raises(SystemExit, match="make protos"):
        _parse(side)


@pytest.mark.parametrize(("path", "found"), [("{wanted}:/else", ""), ("/else:{wanted}", "imports from /else")])
def test_a_service_that_imports_from_another_tree_ends_the_bench(tmp_path, path, found):
    environ = {**os.environ, "PYTHONPATH": path.format(wanted=tmp_path / "services")}
    # A shell that has more to do afterwards starts a child, as a launcher does.
    command = ["sh", "-c", f"{sys.executable} -c 'print(flush=True); input()'; true"]
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        # The child's environment is its own once it runs.
        launcher.stdout.readline()
        if found:
            with pytest.raises(_NotStartedError, match=found):
                _check_sources(launcher.pid, tmp_path)
        else:
            _check_sources(launcher.pid, tmp_path)
        launcher.communicate(b"\n")
