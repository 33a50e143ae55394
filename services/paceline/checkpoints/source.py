"""Where checkpoints come from: folders of this machine, and repositories of the Hugging Face Hub.

After `folder_of` everything works on folders. Cache, token, mirror and offline mode are huggingface_hub's own, set by
its variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote

from paceline.core.errors import ConfigError
from paceline.service.config import exit_with_error

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

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
    if COMMIT.fullmatch(source.revision) and (folder := _cached(source, files)):
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
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
    from huggingface_hub.utils.tqdm import disable_progress_bars

    info = HfApi().model_info(source.name, revision=source.revision, files_metadata=True)
    needed = [file for file in info.siblings or () if _is_needed(file.rfilename, files)]
    if WEIGHTS in files and not any(fnmatch(file.rfilename, WEIGHTS) for file in needed):
        raise unreadable_weights((file.rfilename for file in info.siblings or ()), f"{flag} {source}")
    missing = [
        file
        for file in needed
        if not isinstance(try_to_load_from_cache(source.name, file.rfilename, revision=info.sha), str)
    ]
    num_bytes = sum(file.size or 0 for file in missing)
    if num_bytes > _free_bytes():
        raise _no_space(source, flag, num_bytes)
    if missing:
        say(f"fetching {source} at {str(info.sha)[:12]}: {len(missing)} files, {num_bytes / GB:.3g} GB")
    if not sys.stderr.isatty():
        disable_progress_bars()
    with _ends_at_once():
        folder = snapshot_download(
            source.name,
            revision=source.revision,
            allow_patterns=list(files),
            ignore_patterns=list(NOT_NEEDED),
        )
    _check(Path(folder), missing, flag)
    return Path(folder)


def _is_needed(name: str, files: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in files) and not any(
        fnmatch(name, pattern) for pattern in NOT_NEEDED
    )


def _cached(source: Repository, files: Sequence[str]) -> Path | None:
    """Returns the snapshot in the cache, without asking the Hub; None: it is missing or incomplete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                source.name,
                revision=source.revision,
                allow_patterns=list(files),
                ignore_patterns=list(NOT_NEEDED),
                local_files_only=True,
            )
        )
    except LocalEntryNotFoundError:
        return None
    return folder if (folder / "config.json").is_file() and (WEIGHTS not in files or _has_weights(folder)) else None


def _has_weights(folder: Path) -> bool:
    index = folder / INDEX
    if not index.is_file():
        return any(folder.glob(WEIGHTS))
    names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return all((folder / name).is_file() for name in names)


def _check(folder: Path, files: Iterable[RepoSibling], flag: str) -> None:
    """Compares fetched files with the Hub's hashes; huggingface_hub itself checks sizes.

    Raises:
        ConfigError: A file differs; it is removed.
    """
    for file in files:
        path, lfs = folder / file.rfilename, file.lfs
        if lfs is None:
            continue
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if digest != lfs.sha256:
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise ConfigError(
                f"{flag}: {file.rfilename} arrived with the sha256 {digest[:12]}, the Hub says {lfs.sha256[:12]}; it "
                "is removed, start again to fetch it anew"
            )


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
