"""Compiled kernels are used only as long as all that they were made of is the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest

import paceline
from paceline.forest.committing import judge
from paceline.kernel_cache import ARITHMETIC, FOREST, KernelPlace, cache_folder, take_shipped

PACKAGE = Path(paceline.__file__).parent


def copy_of_sources(folder: Path) -> Path:
    for name in (*ARITHMETIC, *FOREST):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((PACKAGE / name).read_bytes())
    return folder


@pytest.mark.parametrize("sources", [ARITHMETIC, FOREST], ids=["arithmetic", "forest"])
def test_a_change_in_any_source_leads_to_another_folder(tmp_path, sources):
    package = copy_of_sources(tmp_path)
    seen = {cache_folder({}, package, sources)}
    for count, name in enumerate(sources, start=2):
        with (package / name).open("a") as file:
            file.write("# changed\n")
        seen.add(cache_folder({}, package, sources))
        assert len(seen) == count


def test_every_file_that_has_kernels_is_named():
    """A kernel of any other file would be kept after it has changed: nothing but the folder's name tells."""
    decorated = re.compile(r"^@(njit|kernel|inlined|intrinsic)\b", re.MULTILINE)
    found = {
        path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if decorated.search(path.read_text())
    }
    assert len(found) > 10
    assert found <= {*ARITHMETIC, *FOREST}


def test_kernels_are_kept_in_the_users_cache_or_where_the_environment_says(tmp_path):
    package = copy_of_sources(tmp_path)
    cached = cache_folder({"XDG_CACHE_HOME": str(tmp_path / "c")}, package, ARITHMETIC)
    assert cached.parent == tmp_path / "c" / "paceline"
    elsewhere = cache_folder({"NUMBA_CACHE_DIR": str(tmp_path / "d")}, package, ARITHMETIC)
    assert elsewhere == tmp_path / "d" / cached.name
    assert Path(numba.config.CACHE_DIR).name == cached.name, "this very code runs from there"


def test_checkouts_with_equal_sources_share_their_kernels():
    """A kernel's folder says where in the package it stands, and not where the package lies."""
    kept: Any = judge
    assert Path(kept._cache.cache_path) == cache_folder(os.environ, PACKAGE, FOREST) / "forest"
    assert KernelPlace.from_function(copy_of_sources, __file__) is None


def test_an_empty_cache_begins_with_the_kernels_that_an_image_brings(tmp_path):
    folder = tmp_path / "cache" / "kernels-1"
    take_shipped(tmp_path / "compiled", folder)
    assert not folder.exists(), "nothing was brought"
    (tmp_path / "compiled" / "kernels-1").mkdir(parents=True)
    (tmp_path / "compiled" / "kernels-1" / "loop.nbi").write_text("of the image")
    take_shipped(tmp_path / "compiled", folder)
    assert (folder / "loop.nbi").read_text() == "of the image"
    (folder / "loop.nbi").write_text("compiled here")
    take_shipped(tmp_path / "compiled", folder)
    assert (folder / "loop.nbi").read_text() == "compiled here"
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.full
def test_help_writes_nothing_beside_the_sources(tmp_path):
    def contents() -> set[Path]:
        return {path for path in PACKAGE.rglob("*") if path.suffix != ".pyc" and path.name != "__pycache__"}

    before = contents()
    environ = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environ |= {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-m", "paceline", "verifier", "--help"]
    subprocess.run(command, env=environ, check=True, capture_output=True, timeout=60)
    assert contents() == before


def test_every_module_that_makes_compiled_code_is_a_source():
    makes_code = re.compile(
        r"^(from|import) numba|kernel_cache import .*njit|row_kernels import|@intrinsic", re.MULTILINE
    )
    found = {path for path in PACKAGE.rglob("*.py") if makes_code.search(path.read_text())}
    assert found <= {PACKAGE / name for name in (*ARITHMETIC, *FOREST)}


def test_no_kernel_is_decorated_before_its_folder_is_known():
    straight = re.compile(r"^from numba import .*\bnjit\b|numba\.njit", re.MULTILINE)
    users = {path.name for path in PACKAGE.rglob("*.py") if straight.search(path.read_text())}
    assert users == {"kernel_cache.py"}
