"""Finds checkpoint folders: the demo pair in the package, its widening in the user's cache, any folder given.

Widening loads torch, so it runs in a process of its own, this module's `main`. Facts of a checkpoint are read
from its headers; no weights are loaded here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import paceline
from paceline.checkpoints.identity import vocab_hash
from paceline.checkpoints.source import repository_of, unreadable_weights
from paceline.core.errors import ConfigError

MODELS_FOLDER = Path(paceline.__file__).parent / "models"
DEMO_TARGET = MODELS_FOLDER / "demo-target"
DEMO_DRAFTER = MODELS_FOLDER / "demo-drafter"
DEMO_MEDUSA = MODELS_FOLDER / "demo-medusa"
DEMO_EAGLE3 = MODELS_FOLDER / "demo-eagle3"
WIDENED_NAME = "demo-target-widened-{preset}"
WIDENED_PRESET = "98m"
WIDENED_SIZES = {"98m": "98 M", "400m": "400 M"}
MAX_HEADER_BYTES = 100_000_000
# The one setting that a child inherits; see `child_environment`.
LEARNED_DIR = "PACELINE_LEARNED_DIR"
# A thread that spins for long takes the core of the other tier; one that sleeps between two layers takes as long to
# wake on a virtual machine as a layer does. So OpenMP's threads sleep, but after a gap longer than a step has any.
THREAD_SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What the files of a checkpoint folder say of it."""

    path: Path
    architecture: str
    num_parameters: int
    vocab_size: int
    context_len: int
    vocab_hash: str
    widened_from: str | None


def check_checkpoint(path: Path, flag: str) -> Path:
    """Returns the absolute path of a checkpoint folder.

    Raises:
        ConfigError: It is none; names the flag and what is missing.
    """
    if not path.is_dir():
        raise ConfigError(f"{flag} {path}: no such folder")
    if not (path / "config.json").is_file():
        raise ConfigError(f"{flag} {path}: holds no config.json, so it is no Hugging Face checkpoint folder")
    # On a Ray cluster those of a repository are fetched where they are needed.
    if repository_of(path) is None and not any(path.glob("*.safetensors")):
        raise unreadable_weights((file.name for file in path.iterdir()), f"{flag} {path}")
    return path.absolute()


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Returns the folder for what can be made anew."""
    root = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "paceline"


def widened_demo_target(environ: Mapping[str, str], say: Callable[[str], None], preset: str = WIDENED_PRESET) -> Path:
    """Returns the demo target widened to 98 M parameters (or to 400 M), made now if it is not in the cache.

    Raises:
        ConfigError: It cannot be made.
    """
    weights = DEMO_TARGET / "model.safetensors"
    if not weights.is_file():
        raise ConfigError(f"the demo pair is not in {MODELS_FOLDER}: name checkpoints with --model and --draft-model")
    digest = hashlib.sha256()
    for file in sorted(DEMO_TARGET.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    out = cache_folder(environ) / digest.hexdigest()[:16] / WIDENED_NAME.format(preset=preset)
    if not (out / "config.json").is_file():
        say(f"widening the demo target to {WIDENED_SIZES[preset]} parameters, once: {out}")
        _widen_in_own_process(out, preset, environ)
    return out


def bundled_and_cached(environ: Mapping[str, str]) -> list[Path]:
    """Returns the checkpoint folders that are here without being named."""
    cached = sorted(cache_folder(environ).glob(f"*/{WIDENED_NAME.format(preset='*')}"))
    return [path for path in (DEMO_TARGET, DEMO_DRAFTER, *cached) if (path / "config.json").is_file()]


def facts_of(path: Path) -> CheckpointFacts:
    """Reads what a checkpoint folder says of itself.

    Raises:
        ConfigError: It is no checkpoint, or a file in it is broken.
    """
    check_checkpoint(path, "checkpoint")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        widened = config.get("paceline_widened_from")
        return CheckpointFacts(
            path=path,
            architecture=str((config.get("architectures") or ["unknown"])[0]),
            num_parameters=num_parameters(path),
            vocab_size=int(config["vocab_size"]),
            context_len=int(config["max_position_embeddings"]),
            vocab_hash=vocab_hash(path),
            widened_from=None if widened is None else str(widened["name"]),
        )
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise ConfigError(f"checkpoint {path}: a file in it is broken ({error})") from error


def num_parameters(path: Path) -> int:
    """Returns how many numbers the weight files hold; raises `ValueError` when one is broken."""
    return sum(_num_parameters(file) for file in sorted(path.glob("*.safetensors")))


def _num_parameters(file: Path) -> int:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{file.name} is no safetensors file")
        header = json.loads(stream.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _widen_in_own_process(out: Path, preset: str, environ: Mapping[str, str]) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {out.parent}: {error.strerror}; set XDG_CACHE_HOME") from error
    command = [sys.executable, "-m", "paceline.cluster.checkpoints", str(DEMO_TARGET), str(out), preset]
    ended = subprocess.run(command, env=child_environment(environ), capture_output=True, text=True, check=False)
    # Another fleet may have made it at the same time.
    if ended.returncode != 0 and not (out / "config.json").is_file():
        raise ConfigError(f"widening the demo target failed: {ended.stderr.strip()[-500:]}")


def child_environment(environ: Mapping[str, str], *, num_threads: int | None = None) -> dict[str, str]:
    """Returns the environment of a child: ours without our settings, able to import this very package.

    Settings travel as flags; a `PACELINE_PORT` meant for one process must not reach the others. Where a host keeps what
    is learned holds for all that run on it.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith("PACELINE_") or name == LEARNED_DIR}
    source_root = str(Path(paceline.__file__).parents[1])
    path = [source_root, *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    kept["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    kept |= THREAD_SETTINGS
    if num_threads is not None:
        kept["OMP_NUM_THREADS"] = str(num_threads)
    return kept


def main() -> None:
    """Widens the checkpoint folder named first into the one named second, to the preset named third."""
    from paceline.training.widen import PRESETS, widen

    source, out = map(Path, sys.argv[1:3])
    widen(source, out, PRESETS[sys.argv[3]])


if __name__ == "__main__":
    main()
