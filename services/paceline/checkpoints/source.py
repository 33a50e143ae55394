"""Where checkpoints come from: folders of this machine, and repositories of the Hugging Face Hub.

After `folder_of` everything works on folders. Cache, token, mirror and offline mode are huggingface_hub's own, set by
its variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from paceline.checkpoints.commit_record import CommitRecord, ListedFile, one_at_a_time, sha256
from paceline.core.errors import ConfigError
from paceline.service.config import exit_with_error

ConfigT = TypeVar("ConfigT")
Say = Callable[[str], None]

logger = logging.getLogger(__name__)

INDEX: Final = "model.safetensors.index.json"
PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
# Files by which a checkpoint is judged, that a gateway reads, and that an engine reads; vLLM needs more JSON than ours.
CONFIG_FILES: Final = ("config.json", "generation_config.json", "tokenizer_config.json")
TEXT_FILES: Final = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "additional_chat_templates/*.jinja",
)  # fmt: skip
WEIGHTS: Final = "*.safetensors"
MODEL_FILES: Final = (*TEXT_FILES, "*.json", WEIGHTS)
# Other formats of the same weights: as their authors first wrote them, or in subfolders. Patterns know no exceptions;
# these leave the folder of further chat templates alone.
NOT_NEEDED: Final = ("[!a]*/*", "a[!d]*/*", "ad[!d]*/*", "consolidated*", "*.bin.index.json")
# A folder in the Hub's cache, named after its repository.
CACHED: Final = re.compile(r"models--(?P<org>[\w.-]+?)--(?P<name>[\w.-]+)")
# `Path` turns two slashes into one.
HUB_NAME: Final = re.compile(
    r"(?:hf:/{1,2})?(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?"
)
HUB_PREFIX, FILE_PREFIX = "hf:", "file:"
COMMIT: Final = re.compile(r"[0-9a-f]{40}")
MAIN = "main"
GB = 1e9
REFUSED = (401, 403)
NOT_WRITABLE: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A revision of a model repository of the Hub."""

    name: str
    revision: str = MAIN

    def __str__(self) -> str:
        at = "" if self.revision == MAIN else f"@{self.revision}"
        return f"hf://{self.name}{at}"


def parse(given: str | Path) -> Repository | Path:
    """Parses the name of a checkpoint: `ORG/NAME`, `hf://ORG/NAME@REVISION`, `file://FOLDER` or a folder.

    An existing folder wins over a repository of the same name.

    Raises:
        ConfigError: It begins with `hf:` and names no repository.
    """
    text = str(given)
    if text.startswith(FILE_PREFIX):
        return Path("/" + unquote(text.removeprefix(FILE_PREFIX)).lstrip("/"))
    path = Path(text).expanduser()
    named = None if path.exists() else HUB_NAME.fullmatch(text)
    if named:
        return Repository(name=named["repo"], revision=named["revision"] or MAIN)
    if text.startswith(HUB_PREFIX):
        raise ConfigError(f"{text}: must be hf://ORG/NAME or hf://ORG/NAME@REVISION")
    return path


def repository_of(folder: Path) -> Repository | None:
    """The repository and commit of a snapshot in the Hub's cache; None: the folder is no snapshot."""
    path = folder.resolve()
    cached = CACHED.fullmatch(path.parents[1].name) if path.parent.name == "snapshots" else None
    return Repository(name=f"{cached['org']}/{cached['name']}", revision=path.name) if cached else None


def served_name(folder: Path) -> str:
    """The name of a checkpoint for users: its repository without the revision, or otherwise its folder's name."""
    repository = repository_of(folder)
    return folder.resolve().name if repository is None else repository.name


def fetched(config: ConfigT, prog: str, *fields: str, say: Say = logger.info) -> ConfigT:
    """Returns a service's settings with checkpoints replaced by their folders; ends the process if that fails."""
    try:
        folders = {
            name: folder_of(given, f"--{name.replace('_', '-')}", say=say)
            for name in fields
            if (given := getattr(config, name)) is not None
        }
    except ConfigError as error:
        exit_with_error(prog, error)
    return dataclasses.replace(config, **folders)  # type: ignore[type-var]  # each service's is a dataclass


def folder_of(given: str | Path, flag: str, *, files: Sequence[str] = MODEL_FILES, say: Say = logger.info) -> Path:
    """Returns the folder of a checkpoint; files of a Hub repository that are not in the cache are fetched first.

    Args:
        given: As `parse` takes it; a folder is returned unchecked.
        flag: The setting that named it, for messages.
        files: Patterns of the files needed: `MODEL_FILES`, `TEXT_FILES` or `CONFIG_FILES`.
        say: Gets a line before files are fetched.

    Raises:
        ConfigError: It cannot be fetched, or has an unsupported format; says what to do.
    """
    source = parse(given)
    if isinstance(source, Path):
        return source
    # A commit never changes, so the Hub need not be asked again.
    if COMMIT.fullmatch(source.revision) and (folder := _complete(source, source.revision, files)):
        return folder
    from huggingface_hub import errors
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # that of its HTTP client

    try:
        return _fetch(source, flag, files=files, say=say)
    except errors.HfHubHTTPError as error:
        raise _refusal(error, source, flag) from error
    except (OSError, HTTPError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise _no_space(source, flag, None) from error
        if isinstance(error, OSError) and error.errno in NOT_WRITABLE:
            raise ConfigError(
                f"{flag} {source}: the cache {_cache_folder()} cannot be written ({error.strerror}): set HF_HOME to a "
                "folder that can"
            ) from error
        if folder := _cached(source, files):
            return folder
        raise _unreachable(error, source, flag) from error


def unreadable_weights(names: Iterable[str], where: object) -> ConfigError:
    """Returns the error for a checkpoint without safetensors."""
    files = sorted(names)
    pickled = [name for name in files if any(fnmatch(name, pattern) for pattern in PICKLES)]
    if pickled:
        return ConfigError(
            f"{where} holds pickled weights only ({pickled[0]}), which can run code when read and are refused: "
            "convert models with transformers' save_pretrained(..., safe_serialization=True), heads with "
            "safetensors.torch.save_file"
        )
    gguf = [name for name in files if name.endswith(".gguf")]
    if gguf:
        return ConfigError(
            f"{where} holds GGUF weights only ({gguf[0]}), which are not read: name the checkpoint with safetensors "
            "that they were made from"
        )
    return ConfigError(f"{where} has no *.safetensors weights: name a checkpoint that has")


def _fetch(source: Repository, flag: str, *, files: Sequence[str], say: Say) -> Path:
    """Downloads files that are not in the cache; raises huggingface_hub's errors and `ConfigError`."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(source.name, revision=source.revision, files_metadata=True)
    listed = {file.rfilename: ListedFile.of(file) for file in info.siblings or ()}
    needed = [name for name in listed if _is_needed(name, files)]
    if WEIGHTS in files and not any(fnmatch(name, WEIGHTS) for name in needed):
        raise unreadable_weights(listed, f"{flag} {source}")
    repository, commit = _repository_folder(source), str(info.sha)
    with one_at_a_time(repository):
        known = CommitRecord.read(repository, commit)
        record = CommitRecord(repository, commit, listed, () if known is None else filter(known.has, known.files))
        _look_at_unmarked(record, needed, say)
        missing = [name for name in needed if not record.has(name)]
        if missing:
            _download(source, record, missing, flag, say)
        for name in missing:
            _check(record, name, flag)
        _remember(repository, source.revision, commit)
    return record.folder


def _look_at_unmarked(record: CommitRecord, needed: Iterable[str], say: Say) -> None:
    """Compares files that an earlier process, or another program, has left here; wrong ones are removed."""
    unmarked = [name for name in needed if not record.has(name) and (record.folder / name).is_file()]
    num_bytes = sum((record.folder / name).stat().st_size for name in unmarked)
    if num_bytes > GB:
        say(f"comparing {num_bytes / GB:.3g} GB in {record.folder} with the Hub's hashes, once")
    for name in unmarked:
        if not record.check(name):
            logger.warning("%s differs from the Hub's, and is fetched anew", record.folder / name)
            _remove(record.folder / name)


def _download(source: Repository, record: CommitRecord, missing: Sequence[str], flag: str, say: Say) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    commit = record.folder.name
    num_bytes = sum(record.files[name].size or 0 for name in missing)
    if num_bytes > _free_bytes():
        raise _no_space(source, flag, num_bytes)
    say(f"fetching {source} at {commit[:12]}: {len(missing)} files, {num_bytes / GB:.3g} GB")
    if not sys.stderr.isatty():
        disable_progress_bars()
    # By the commit: a branch may have moved since it was listed.
    with _ends_at_once():
        snapshot_download(source.name, revision=commit, allow_patterns=list(missing))


def _remember(repository: Path, revision: str, commit: str) -> None:
    """Notes which commit a branch is at, as huggingface_hub does, for starts without the Hub."""
    if COMMIT.fullmatch(revision):
        return
    path = repository / "refs" / revision
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_text(commit, encoding="ascii")
        beside.replace(path)


def _is_needed(name: str, files: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in files) and not any(
        fnmatch(name, pattern) for pattern in NOT_NEEDED
    )


def _complete(source: Repository, commit: str, files: Sequence[str]) -> Path | None:
    """Returns the snapshot of a commit if all files needed lie in it with the right bytes; asks nobody."""
    record = CommitRecord.read(_repository_folder(source), commit)
    if record is None or not all(record.has_right(name) for name in record.files if _is_needed(name, files)):
        return None
    return record.folder


def _cached(source: Repository, files: Sequence[str]) -> Path | None:
    """Returns what is in the cache when the Hub cannot be asked; None: it is missing or incomplete.

    Snapshots that other programs have fetched have no record; these are judged by what lies in them.
    """
    repository = _repository_folder(source)
    commit = source.revision
    with suppress(OSError):
        if not COMMIT.fullmatch(commit):
            commit = (repository / "refs" / source.revision).read_text(encoding="ascii").strip()
    folder = repository / "snapshots" / commit
    if CommitRecord.read(repository, commit) is not None:
        return _complete(source, commit, files)
    if not (folder / "config.json").is_file() or not (WEIGHTS not in files or _has_weights(folder)):
        return None
    logger.warning("%s was not compared with the Hub's list of its files, which cannot be asked now", folder)
    return folder


def _has_weights(folder: Path) -> bool:
    index = folder / INDEX
    if not index.is_file():
        return any(folder.glob(WEIGHTS))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return all((folder / name).is_file() for name in names)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _check(record: CommitRecord, name: str, flag: str) -> None:
    """Compares a fetched file with the Hub's hash.

    Raises:
        ConfigError: It differs; it is removed.
    """
    if record.check(name):
        return
    path, listed = record.folder / name, record.files[name]
    arrived, wanted = sha256(path), listed.sha256 or listed.blob_id or ""
    _remove(path)
    raise ConfigError(
        f"{flag}: {name} arrived with the sha256 {arrived[:12]}, the Hub says {wanted[:12]}; it is removed, start "
        "again to fetch it anew"
    )


def _remove(path: Path) -> None:
    """Removes a file of a snapshot, and the blob that it is a link to."""
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def _repository_folder(source: Repository) -> Path:
    return _cache_folder() / f"models--{source.name.replace('/', '--')}"


def _cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _free_bytes() -> int:
    folder = _cache_folder()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.is_dir())).free


def _no_space(source: Repository, flag: str, num_bytes: int | None) -> ConfigError:
    needed = "more than is free" if num_bytes is None else f"{num_bytes / GB:.3g} GB"
    return ConfigError(
        f"{flag} {source} needs {needed} in {_cache_folder()}, where {_free_bytes() / GB:.3g} GB are free: free some, "
        "or set HF_HOME to a folder on a larger disk"
    )


def _refusal(error: Any, source: Repository, flag: str) -> ConfigError:
    """Returns the error for a refusal by the Hub."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{source.name}"
    status = error.response.status_code
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"{flag} {source}: {source.name} has no revision {source.revision}; {page} lists them")
    if isinstance(error, errors.RepositoryNotFoundError) and not isinstance(error, errors.GatedRepoError):
        return ConfigError(
            f"{flag} {source}: there is no such folder here, and no repository {source.name} (revision "
            f"{source.revision}) at {constants.ENDPOINT}; if it is private, set HF_TOKEN to a token that may read it"
        )
    if status in REFUSED:
        return ConfigError(
            f"{flag} {source} is gated: accept its licence at {page}, and set HF_TOKEN to a token of that account"
        )
    return ConfigError(f"{flag} {source}: {constants.ENDPOINT} answered with status {status}; try again later")


def _unreachable(error: Exception, source: Repository, flag: str) -> ConfigError:
    from huggingface_hub import constants

    where = f"and it is not (wholly) in the cache {_cache_folder()}"
    if constants.HF_HUB_OFFLINE:
        return ConfigError(
            f"{flag} {source}: HF_HUB_OFFLINE forbids to ask the Hub, {where}: fetch it once without that variable"
        )
    reason = " ".join(str(error).split()) or type(error).__name__
    return ConfigError(
        f"{flag} {source}: it could not be fetched from {constants.ENDPOINT} ({reason}), {where}: check the connection "
        "and HF_ENDPOINT, and start again; whole files are kept"
    )


@contextmanager
def _ends_at_once() -> Iterator[None]:
    """Lets Ctrl-C end the process during a fetch; otherwise huggingface_hub's threads finish their files first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
