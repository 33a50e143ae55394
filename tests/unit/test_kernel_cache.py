"""Compiled kernels are used only as long as all that they were made of is the same."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core import serialize

import paceline
from paceline import kernel_cache
from paceline.forest.tree_loops import sigmoid
from paceline.kernel_cache import ARITHMETIC, FOREST, KernelCache, cache_folder, take_shipped

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


def test_kernels_are_kept_in_the_users_cache_or_where_the_environment_says(tmp_path):
    package = copy_of_sources(tmp_path)
    cached = cache_folder({"XDG_CACHE_HOME": str(tmp_path / "c")}, package, ARITHMETIC)
    assert cached.parent == tmp_path / "c" / "paceline"
    elsewhere = cache_folder({"NUMBA_CACHE_DIR": str(tmp_path / "d")}, package, ARITHMETIC)
    assert elsewhere == tmp_path / "d" / cached.name


def as_another_process_has_it(folder: Path) -> Any:
    """A kernel that was not called yet, and what any process has kept of it."""
    loop: Any = getattr(sigmoid, "py_func", sigmoid)
    kernel: Any = numba.njit(loop)
    kernel._cache = KernelCache(loop, folder)
    return kernel


def test_a_kernel_that_another_process_is_compiling_is_waited_for(tmp_path, monkeypatch):
    first, second = as_another_process_has_it(tmp_path), as_another_process_has_it(tmp_path)
    assert first(0.5) == pytest.approx(0.622, abs=1e-3)
    (kept,) = tmp_path.iterdir()
    kept.unlink()
    claim = kernel_cache._claim(kept)

    def the_other_is_done(_: float) -> None:
        monkeypatch.undo()
        os.close(claim)
        as_another_process_has_it(tmp_path)(0.5)

    monkeypatch.setattr(kernel_cache.time, "sleep", the_other_is_done)
    assert second(0.5) == first(0.5)
    assert sum(second.stats.cache_hits.values()) == 1
    assert [*tmp_path.iterdir()] == [kept], "claims are gone"


def test_a_kernel_is_compiled_once_for_all_processes_and_checkouts(tmp_path):
    first, second = as_another_process_has_it(tmp_path), as_another_process_has_it(tmp_path)
    assert first(0.5) == second(0.5)
    assert [sum(each.stats.cache_hits.values()) for each in (first, second)] == [0, 1]
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith("forest_tree_loops.sigmoid-"), "where in the package, not where the package lies"


def test_processes_that_compile_at_once_keep_their_signatures_apart(tmp_path, monkeypatch):
    """One keeps its code for whole numbers while another is about to keep its own for fractions."""
    one, other = as_another_process_has_it(tmp_path), as_another_process_has_it(tmp_path)
    dumps = serialize.dumps

    def keep_another_first(value: object) -> Any:
        monkeypatch.setattr(serialize, "dumps", dumps)
        other(1)
        return dumps(value)

    monkeypatch.setattr(serialize, "dumps", keep_another_first)
    one(1.0)
    third = as_another_process_has_it(tmp_path)
    assert third(1) == third(1.0) == pytest.approx(0.731, abs=1e-3)
    assert sum(third.stats.cache_hits.values()) == 2
    assert {arguments: each.signature.args for arguments, each in third.overloads.items()} == {
        (numba.int64,): (numba.int64,),
        (numba.float64,): (numba.float64,),
    }


def test_code_of_another_signature_is_not_run_whatever_the_name_of_its_file(tmp_path):
    as_another_process_has_it(tmp_path)(1)
    (whole,) = tmp_path.iterdir()
    as_another_process_has_it(tmp_path)(1.0)
    (fraction,) = set(tmp_path.iterdir()) - {whole}
    whole.replace(fraction)
    kernel = as_another_process_has_it(tmp_path)
    assert kernel(0.5) == pytest.approx(0.622, abs=1e-3)
    assert not kernel.stats.cache_hits


def test_a_file_that_was_cut_off_is_written_anew(tmp_path):
    as_another_process_has_it(tmp_path)(0.5)
    (kept,) = tmp_path.iterdir()
    whole = kept.read_bytes()
    for left in (0, 40, len(whole) // 2):
        kept.write_bytes(whole[:left])
        assert as_another_process_has_it(tmp_path)(0.5) == pytest.approx(0.622, abs=1e-3)
        again = as_another_process_has_it(tmp_path)
        again(0.5)
        assert sum(again.stats.cache_hits.values()) == 1


@pytest.mark.parametrize("flag", ["BOUNDSCHECK", "OPT", "DEBUGINFO_DEFAULT"])
def test_code_that_was_made_by_other_flags_of_numba_is_not_run(tmp_path, monkeypatch, flag: str):
    """Audit 3, a20: NUMBA_BOUNDSCHECK=1 found nothing where kernels were kept, and slow ones were kept for services."""
    as_another_process_has_it(tmp_path)(0.5)
    monkeypatch.setattr(numba.config, flag, 1)
    checked = as_another_process_has_it(tmp_path)
    checked(0.5)
    assert not checked.stats.cache_hits
    monkeypatch.undo()
    usual = as_another_process_has_it(tmp_path)
    usual(0.5)
    assert sum(usual.stats.cache_hits.values()) == 1


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_code_is_not_read_where_others_may_write(tmp_path, mode: int):
    """Audit 3, a09: whoever may write there would run code with our rights."""
    folder = tmp_path / "kernels-1"
    as_another_process_has_it(folder)(0.5)
    for kept in folder.iterdir():
        kept.write_bytes(b"cbuiltins\neval\n(S'1 / 0'\ntR.")
    folder.chmod(mode)
    kernel = as_another_process_has_it(folder)
    assert kernel(0.5) == pytest.approx(0.622, abs=1e-3)
    assert not kernel.stats.cache_hits


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG])
def test_a_kernel_that_cannot_be_kept_runs_all_the_same(tmp_path, monkeypatch, caplog, number: int):
    """Audit 3, a04: a full disk ended each start, and a running engine that compiled one more kernel."""

    def full(self: Path, content: bytes) -> int:
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    for _ in range(2):
        assert as_another_process_has_it(tmp_path / str(number))(0.5) == pytest.approx(0.622, abs=1e-3)
    assert not [*(tmp_path / str(number)).iterdir()]
    assert [record.getMessage() for record in caplog.records] == [
        "kernels cannot be kept, each process compiles them anew"
    ]


def test_an_empty_cache_begins_with_the_kernels_that_an_image_brings(tmp_path):
    folder = tmp_path / "cache" / "kernels-1"
    take_shipped(tmp_path / "compiled", folder)
    assert not folder.exists(), "nothing was brought"
    (tmp_path / "compiled" / "kernels-1").mkdir(parents=True)
    (tmp_path / "compiled" / "kernels-1" / "loop").write_text("of the image")
    take_shipped(tmp_path / "compiled", folder)
    assert (folder / "loop").read_text() == "of the image"
    (folder / "loop").write_text("compiled here")
    take_shipped(tmp_path / "compiled", folder)
    assert (folder / "loop").read_text() == "compiled here"
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
        r"^(from|import) numba|kernel_cache import .*(compiled|kernel|inlined)\b|row_kernels import|@intrinsic",
        re.MULTILINE,
    )
    found = {path for path in PACKAGE.rglob("*.py") if makes_code.search(path.read_text())}
    assert found <= {PACKAGE / name for name in (*ARITHMETIC, *FOREST)}


def test_no_kernel_is_decorated_before_its_folder_is_known():
    straight = re.compile(r"^from numba import .*\bnjit\b|numba\.njit", re.MULTILINE)
    users = {path.name for path in PACKAGE.rglob("*.py") if straight.search(path.read_text())}
    assert users == {"kernel_cache.py"}


def test_shipped_kernels_that_may_not_be_read_are_compiled_anew(tmp_path, monkeypatch):
    """An image whose folder was private to its builder ended every start of a service."""

    def refuse(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    take_shipped(tmp_path / "compiled", tmp_path / "cache" / "kernels")
    assert not (tmp_path / "cache").exists()
