"""Compiled kernels are used only as long as all that they were made of is the same."""

from __future__ import annotations

import re
from pathlib import Path

import numba

import paceline
from paceline.engine.backends.cpu.kernel_cache import SOURCES, cache_folder

PACKAGE = Path(paceline.__file__).parent


def copy_of_sources(folder: Path) -> Path:
    for name in SOURCES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((PACKAGE / name).read_bytes())
    return folder


def test_a_change_in_any_source_leads_to_another_folder(tmp_path):
    package = copy_of_sources(tmp_path)
    seen = {cache_folder({}, package)}
    for count, name in enumerate(SOURCES, start=2):
        with (package / name).open("a") as file:
            file.write("# changed\n")
        seen.add(cache_folder({}, package))
        assert len(seen) == count


def test_kernels_are_kept_beside_their_sources_or_where_the_environment_says(tmp_path):
    package = copy_of_sources(tmp_path)
    beside = cache_folder({}, package)
    assert beside.parent == package / "engine" / "__pycache__"
    elsewhere = cache_folder({"NUMBA_CACHE_DIR": "/somewhere"}, package)
    assert elsewhere == Path("/somewhere") / beside.name
    assert Path(numba.config.CACHE_DIR).name == beside.name, "this very code runs from there"


def test_every_module_that_makes_compiled_code_is_a_source():
    makes_code = re.compile(
        r"^(from|import) numba|kernel_cache import .*njit|row_kernels import|@intrinsic", re.MULTILINE
    )
    found = {path for path in PACKAGE.rglob("*.py") if makes_code.search(path.read_text())}
    assert found <= {PACKAGE / name for name in SOURCES}


def test_no_kernel_is_decorated_before_its_folder_is_known():
    straight = re.compile(r"^from numba import .*\bnjit\b|numba\.njit", re.MULTILINE)
    users = {path.name for path in PACKAGE.rglob("*.py") if straight.search(path.read_text())}
    assert users == {"kernel_cache.py"}
