"""Where what can be made again is kept, on machines where the user has no home or may not write there."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import pytest

from paceline import user_cache as module
from paceline.core.errors import ConfigError
from paceline.kernel_cache import FOREST, PACKAGE, cache_folder
from paceline.service.config import load, setting
from paceline.service.learned import kept_in
from paceline.user_cache import NothingWritableError, make_private, user_cache, writable


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, and no memory of earlier answers."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    module._temporary.cache_clear()
    return folder


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_cache_that_can_be_written_is_taken_and_not_made(tmp_path: Path) -> None:
    assert user_cache({"XDG_CACHE_HOME": str(tmp_path / "new")}) == tmp_path / "new" / "paceline"
    assert not (tmp_path / "new").exists()


def test_a_user_without_an_entry_gets_a_temporary_folder(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """LMCache #4597, dynamo #12457: a container with a number for a user, and no HOME."""
    monkeypatch.setattr(Path, "home", no_home)
    with caplog.at_level(logging.WARNING):
        folder = user_cache({})
    assert folder == user_cache({}) == temporary / f"paceline-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [record.getMessage() for record in caplog.records] == [
        f"no home folder is known: {folder} is used instead; set XDG_CACHE_HOME to keep what is made once"
    ]
    assert kept_in("", {}, "facts").path.is_relative_to(folder)  # type: ignore[union-attr]


def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_folder(tmp_path: Path, temporary: Path) -> None:
    # Nobody can make a folder below a file, not even root.
    (tmp_path / "file").touch()
    assert user_cache({"XDG_CACHE_HOME": str(tmp_path / "file" / "cache")}).parent == temporary
    assert writable(tmp_path / "file", "NUMBA_CACHE_DIR").parent == temporary


def test_a_temporary_folder_of_somebody_else_is_not_trusted(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "file").touch()
    theirs = temporary / f"paceline-{os.getuid()}"
    theirs.mkdir()
    theirs.chmod(0o777)
    folder = writable(tmp_path / "file", "NUMBA_CACHE_DIR")
    assert folder != theirs
    assert folder.stat().st_mode & 0o777 == 0o700


def test_with_no_place_at_all_one_line_names_the_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(
        NothingWritableError, match=r"cannot be written, and neither can .*: set NUMBA_CACHE_DIR or TMPDIR to"
    ):
        writable(tmp_path / "file", "NUMBA_CACHE_DIR")


def test_a_path_below_an_unknown_home_names_home(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    @dataclasses.dataclass(frozen=True)
    class Config:
        folder: Path | None = setting(None, help="A folder.")

    with pytest.raises(ConfigError, match=r"~nobody-at-all/x: .* HOME is not set, or there is no such user"):
        load(Config, ["--folder", "~nobody-at-all/x"], {}, "prog", "")


@pytest.mark.parametrize("taken_by", ["a file", "a dangling link"])
def test_a_file_or_a_link_in_the_place_of_the_temporary_folder_ends_no_start(
    tmp_path: Path, temporary: Path, taken_by: str
) -> None:
    """Audit 3, a23: anybody on the machine can make it."""
    (tmp_path / "file").touch()
    theirs = temporary / f"paceline-{os.getuid()}"
    if taken_by == "a file":
        theirs.touch()
    else:
        theirs.symlink_to(tmp_path / "nowhere")
    folder = writable(tmp_path / "file", "NUMBA_CACHE_DIR")
    assert (folder.parent, folder.stat().st_mode & 0o777) == (temporary, 0o700)
    assert folder != theirs


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o757])
def test_a_cache_that_others_may_write_is_replaced_by_a_temporary_folder(
    tmp_path: Path, temporary: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Audit 3, a09: kernels lie there, which are run as they are found."""
    cache = tmp_path / "cache"
    (cache / "paceline").mkdir(parents=True)
    assert user_cache({"XDG_CACHE_HOME": str(cache)}) == cache / "paceline"
    (cache / "paceline").chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert user_cache({"XDG_CACHE_HOME": str(cache)}).parent == temporary
    assert "may be written by others" in caplog.text


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_cache_of_somebody_else_is_not_trusted(tmp_path: Path, temporary: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(0o755)
    os.chown(cache, 12345, 12345)
    assert writable(cache, "NUMBA_CACHE_DIR").parent == temporary


def test_folders_are_made_for_their_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "cache" / "paceline" / "kernels-1")
    finally:
        os.umask(before)
    for folder in (tmp_path / "cache" / "paceline", tmp_path / "cache" / "paceline" / "kernels-1"):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_with_no_place_at_all_nothing_is_kept_and_nothing_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    environ = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    assert cache_folder(environ, PACKAGE, FOREST) is None
    assert kept_in("", environ, "facts").path is None
    assert "kernels are compiled at each start" in caplog.text
    assert "what is learned is not kept" in caplog.text
