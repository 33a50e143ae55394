"""Where checkpoints come from: folders and GGUF files of this machine, packages, and the Hugging Face Hub.

After `folder_of` everything works on folders. Cache, token, mirror and offline mode are huggingface_hub's own, set by
its variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import unquote

from paceline.checkpoints.cached import gguf_checkpoint, packaged_checkpoint, packaged_model
from paceline.checkpoints.gguf_files import SUFFIX
from paceline.checkpoints.json_files import CONFIG, read_object
from paceline.core.errors import ConfigError
from paceline.service.config import exit_with_error, named, reason

ConfigT = TypeVar("ConfigT")
Say = Callable[[str], None]

logger = logging.getLogger(__name__)

INDEX: Final = "model.safetensors.index.json"
PICKLES: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
# Files that a gateway reads, and that an engine reads; vLLM needs more JSON than ours.
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
PART: Final = re.compile(r"-of-\d+\.")
MAIN = "main"
# Files named in a message.
MOST_NAMED: Final = 4
NOT_WRITABLE: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT)


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
    """Returns the folder of a checkpoint, which is fetched or converted first if it is not in a cache.

    Args:
        given: The name of a packaged model, a GGUF file or a folder with one, or as `parse` takes it; of a folder with
            a checkpoint it is checked only that what is in it can be read.
        flag: The setting that named it, for messages.
        files: Patterns of the files needed: `MODEL_FILES` or `TEXT_FILES`.
        say: Gets a line before something is fetched or converted.

    Raises:
        ConfigError: It cannot be fetched or read, or has an unsupported format; says what to do.
    """
    packaged = packaged_model(given)
    if packaged is not None:
        return packaged_checkpoint(packaged, flag, say)
    with named(flag, given):
        source = parse(given)
        if isinstance(source, Path):
            _check_readable(source, files)
            gguf = _gguf_of(source)
    if isinstance(source, Path):
        return source if gguf is None else gguf_checkpoint(gguf, flag, say)
    from huggingface_hub import errors
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # that of its HTTP client

    try:
        return _snapshot(source, flag, files, say)
    except errors.LocalEntryNotFoundError as error:
        raise _unreachable(error, source, flag) from error
    except errors.HfHubHTTPError as error:
        # It says the same of a repository that is not there and of one that the token may not read.
        raise ConfigError(
            f"{flag} {source}: there is no such folder here, and the Hub refuses it: {reason(error)}; for a private or "
            "gated repository set HF_TOKEN to a token that may read it"
        ) from error
    except (OSError, HTTPError) as error:
        if isinstance(error, OSError) and error.errno in NOT_WRITABLE:
            raise ConfigError(
                f"{flag} {source}: the cache {_cache_folder()} cannot be written ({error.strerror}): set HF_HOME to a "
                "folder that can, on a disk with room"
            ) from error
        raise _unreachable(error, source, flag) from error


def _gguf_of(path: Path) -> Path | None:
    """The GGUF file that is meant: itself, or the only one of a folder without a checkpoint."""
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    found = sorted(path.glob(f"*{SUFFIX}"))
    return found[0] if len(found) == 1 and not (path / CONFIG).is_file() else None


def _check_readable(folder: Path, files: Sequence[str]) -> None:
    """Opens each file of a folder that will be read, as later it would be in the middle of a start.

    Raises:
        OSError: A file or the folder cannot be read.
    """
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if any(fnmatch(path.name, pattern) for pattern in files) and path.is_file():
            path.open("rb").close()


def _snapshot(source: Repository, flag: str, files: Sequence[str], say: Say) -> Path:
    """The snapshot in the cache, fetched as far as needed; raises `ConfigError` and huggingface_hub's errors."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    # A commit never changes, so the Hub need not be asked again.
    if COMMIT.fullmatch(source.revision):
        with suppress(OSError):
            folder = _download(source, files, cached=True)
            # Other programs, and old releases of huggingface_hub, may have left out the tokenizer.
            if not _missing(folder, files) and (folder / "tokenizer.json").is_file():
                return folder
    if not constants.HF_HUB_OFFLINE:
        say(f"{source}: what is not in {_cache_folder()} is fetched from {constants.ENDPOINT}")
    if not sys.stderr.isatty():
        disable_progress_bars()
    with _ends_at_once():
        folder = _download(source, files)
    missing = _missing(folder, files)
    if missing == WEIGHTS and not constants.HF_HUB_OFFLINE:
        raise unreadable_weights(HfApi().list_repo_files(source.name, revision=folder.name), f"{flag} {source}")
    if missing:
        raise _unreachable(FileNotFoundError(f"{missing} is missing"), source, flag)
    return folder


def _download(source: Repository, files: Sequence[str], *, cached: bool = False) -> Path:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        source.name,
        revision=source.revision,
        allow_patterns=list(files),
        ignore_patterns=list(NOT_NEEDED),
        local_files_only=cached,
    )
    return Path(folder)


def _missing(folder: Path, files: Sequence[str]) -> str:
    """A file that a snapshot lacks, if any: other programs, and old releases of huggingface_hub, leave parts of one."""
    needed = ["config.json"]
    if WEIGHTS in files and (folder / INDEX).is_file():
        weight_map = read_object(folder / INDEX).get("weight_map")
        needed += map(str, weight_map.values() if isinstance(weight_map, dict) else ())
    elif WEIGHTS in files and all(PART.search(path.name) for path in folder.glob(WEIGHTS)):
        needed.append(INDEX if any(folder.glob(WEIGHTS)) else WEIGHTS)
    return next((name for name in needed if not (folder / name).is_file()), "")


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
            f"{where} holds GGUF weights only ({', '.join(gguf[:MOST_NAMED])}): give one of these files on this "
            "machine, which is converted, or the checkpoint with safetensors that they were made from"
        )
    return ConfigError(f"{where} has no *.safetensors weights: name a checkpoint that has")


def _cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _unreachable(error: Exception, source: Repository, flag: str) -> ConfigError:
    from huggingface_hub import constants

    where = f"and it is not (wholly) in the cache {_cache_folder()}"
    if constants.HF_HUB_OFFLINE:
        return ConfigError(
            f"{flag} {source}: HF_HUB_OFFLINE forbids to ask the Hub, {where}: fetch it once without that variable"
        )
    return ConfigError(
        f"{flag} {source}: it could not be fetched from {constants.ENDPOINT} ({reason(error)}), {where}: check the "
        "connection and HF_ENDPOINT, and start again; whole files are kept"
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
