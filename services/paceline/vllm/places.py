"""Where the parts of the tier under vLLM find things: the helper's socket, the target's tokenizer."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from paceline.core.errors import ConfigError

MODE_SUFFIX = ".mode"


def runtime_folder() -> Path:
    """Returns a folder that only this user can write to, and makes it if necessary.

    Raises:
        ConfigError: It cannot be made, or others can write to it.
    """
    folder = Path(tempfile.gettempdir()) / f"paceline-vllm-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(f"{folder} must be a folder of this user, which nobody else can write to; remove it")
    return folder


def mode_socket(instance_id: str, engine: int) -> Path:
    """Returns the Unix socket at which `paceline rehearse` sends a vLLM engine's helper the mode.

    Raises:
        ConfigError: There is no folder for it.
    """
    return runtime_folder() / f"{instance_id}-{engine}{MODE_SUFFIX}"


def helper_socket(instance_id: str) -> Path | None:
    """Returns the same of a vLLM of one engine; None: its helper is not there yet.

    Raises:
        ConfigError: There is no folder for it.
    """
    # The engines of one vLLM append their own suffixes to its id.
    return next(runtime_folder().glob(f"{instance_id}*-*{MODE_SUFFIX}"), None)


def mode_sockets() -> list[Path]:
    """Returns the sockets of that kind that there are, also of helpers that were killed.

    Raises:
        ConfigError: There is no folder for them.
    """
    return sorted(runtime_folder().glob(f"*{MODE_SUFFIX}"))


def tokenizer_folder(name: str, revision: str | None) -> Path:
    """Returns the folder of a tokenizer: itself, or its snapshot in the Hub's local cache.

    Raises:
        ConfigError: There is neither.
    """
    if Path(name).is_dir():
        return Path(name).resolve()
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the tokenizer {name} is neither a folder nor in the local cache of the Hub: {error}"
        ) from None
