"""Where what can be made again is kept, on machines where the user has no home or may not write there."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import pytest

from paceline import user_cache as module
from paceline.core.errors import ConfigError
from paceline.service.config import load, setting
from paceline.service.learned import kept_in
from paceline.user_cache import NothingWritableError, user_cache, writable


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
