"""Where the parts of a tier under one vLLM find one another: the helper's socket of metrics, the target's tokenizer."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from paceline.core.errors import ConfigError

SUFFIX = ".sock"


def runtime_folder() -> Path:
    """A folder of this user alone, made if it is not there.

    Raises:
        ConfigError: It cannot be made, or somebody else may write there.
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


def metrics_socket(instance_id: str, engine: int) -> Path:
    """The Unix socket at which the metrics of an engine's helper are read.

    Raises:
        ConfigError: There is no folder for it.
    """
    return runtime_folder() / f"{instance_id}-{engine}{SUFFIX}"


def metrics_sockets(instance_id: str) -> dict[str, Path]:
    """Those that are there, by the number of the engine.

    Raises:
        ConfigError: There is no folder for them.
    """
    # The engines of one vLLM put their own ends to its id.
    return {path.stem.rpartition("-")[2]: path for path in runtime_folder().glob(f"{instance_id}*-*{SUFFIX}")}


def tokenizer_folder(name: str, revision: str | None) -> Path:
    """The folder of a tokenizer: itself, or what the Hub's local cache holds under its name.

    Raises:
        ConfigError: There is none.
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
