"""What we know of a commit in the Hub's cache: which files it has, and which of them lie here with the right bytes.

huggingface_hub keeps files, and cannot tell a part of a snapshot from the whole. So beside the snapshots of a
repository lies a record for each commit: the Hub's own list of its files, and the names of those whose hashes were
compared. A process that is killed leaves files without that mark, which are looked at again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

# Folder of the records, in that of a repository in the cache.
FOLDER: Final = ".paceline"
CHUNK_BYTES: Final = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedFile:
    """A file as the Hub lists it: its size, and the sha256 of a large one or the git hash of another; None: unknown."""

    size: int | None
    sha256: str | None
    blob_id: str | None

    @classmethod
    def of(cls, file: RepoSibling) -> ListedFile:
        """Takes what is needed of an entry of the Hub's list."""
        return cls(size=file.size, sha256=None if file.lfs is None else file.lfs.sha256, blob_id=file.blob_id)

    def has_bytes_of(self, path: Path) -> bool:
        """Whether a file is this one; reads it to its end."""
        if self.size is not None and path.stat().st_size != self.size:
            return False
        if self.sha256 is not None:
            return sha256(path) == self.sha256
        return self.blob_id is None or _hash(path, hashlib.sha1(b"blob %d\0" % path.stat().st_size)) == self.blob_id


class CommitRecord:
    """The record of one commit.

    Args:
        repository: Folder of the repository in the cache.
        commit: Its hash.
        files: The Hub's list.
        checked: Names of files whose bytes were right.
    """

    def __init__(
        self, repository: Path, commit: str, files: Mapping[str, ListedFile], checked: Iterable[str] = ()
    ) -> None:
        self.folder = repository / "snapshots" / commit
        self.files = dict(files)
        self._checked = set(checked)
        self._path = _path(repository, commit)

    @classmethod
    def read(cls, repository: Path, commit: str) -> CommitRecord | None:
        """Reads a record; None: there is none, or it cannot be read."""
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            content: dict[str, Any] = json.loads(_path(repository, commit).read_text(encoding="utf-8"))
            files = {name: ListedFile(**file) for name, file in content["files"].items()}
            return cls(repository, commit, files, content["checked"])
        return None

    def has(self, name: str) -> bool:
        """Whether a file lies here, and its bytes were right when they were looked at."""
        path = self.folder / name
        if name not in self._checked or not path.is_file():
            return False
        size = self.files[name].size
        return size is None or path.stat().st_size == size

    def has_right(self, name: str) -> bool:
        """Whether a file lies here with the right bytes; looks at it if nobody has."""
        return self.has(name) or ((self.folder / name).is_file() and self.check(name))

    def check(self, name: str) -> bool:
        """Compares a file that lies here with the Hub's hash, and marks it if they agree."""
        if not self.files[name].has_bytes_of(self.folder / name):
            return False
        self._checked.add(name)
        self._write()
        return True

    def _write(self) -> None:
        """Writes atomically. A cache that cannot be written costs another look at the next start."""
        files = {name: {field: getattr(file, field) for field in _FIELDS} for name, file in self.files.items()}
        content = json.dumps({"files": files, "checked": sorted(self._checked)})
        beside = self._path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(content, encoding="utf-8")
            beside.replace(self._path)


_FIELDS: Final = ("size", "sha256", "blob_id")


def sha256(path: Path) -> str:
    """The hash of a file, in hexadecimal digits."""
    return _hash(path, hashlib.sha256())


@contextmanager
def one_at_a_time(repository: Path) -> Iterator[None]:
    """Keeps other processes of this machine from fetching the same repository while a block runs.

    Where the cache cannot be written nothing can be fetched, and there is nothing to guard.
    """
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    folder = repository / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        guarded = os.access(folder, os.W_OK)
    except OSError:
        guarded = False
    if not guarded:
        yield
        return
    with WeakFileLock(folder / "lock"):
        yield


def _path(repository: Path, commit: str) -> Path:
    return repository / FOLDER / f"{commit}.json"


def _hash(path: Path, digest: Any) -> str:
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return str(digest.hexdigest())
