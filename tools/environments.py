"""The peers' own environments: made once in the user's cache folder, found again by the digest of what they hold.

Requirements are complete lists, installed without resolving: no peer can pull in a CUDA torch, or a torchvision that
does not fit it. torch==2.13.0 is the CPU build where pip has an index for one, as for our own constraints.txt.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from paceline.user_cache import user_cache
from tools.processes import CommandFailedError, run_command

REQUIREMENTS = Path(__file__).parent / "requirements"
INSTALL_S = 900.0
CONVERT_S = 600.0
READY = ".ready"
INCLUDES = "-r "
# Ours would lead a peer astray, or (bytecode) make every start of it slower.
DROPPED_PREFIXES = ("PACELINE_", "PYTHON", "OMP_", "KMP_", "VIRTUAL_ENV", "LD_PRELOAD")


def peers_folder(environ: Mapping[str, str]) -> Path:
    """Where environments and converted models are kept; safe to remove."""
    return user_cache(environ) / "peers"


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a peer: nothing of ours, and nothing that makes it ask the network."""
    kept = {name: value for name, value in environ.items() if not name.startswith(DROPPED_PREFIXES)}
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(peers_folder(environ) / "vllm-cache"),
    }


def environment(name: str, environ: Mapping[str, str], say: Callable[[str], None]) -> Path:
    """Returns the Python of a peer's environment, which is made now if it is not there.

    Raises:
        CommandFailedError: It cannot be made; the message is one line.
    """
    folder = _folder(name, environ)
    with locked(folder):
        if not (folder / READY).is_file():
            say(f"setting up {name}, once: {folder}")
            _make(folder, REQUIREMENTS / f"{name}.txt", child_environ(environ))
            (folder / READY).touch()
    return _python(folder)


def known_environment(name: str, environ: Mapping[str, str]) -> Path | None:
    """Returns the Python of a peer's environment that is there already; None: it is not."""
    folder = _folder(name, environ)
    return _python(folder) if (folder / READY).is_file() else None


def _folder(name: str, environ: Mapping[str, str]) -> Path:
    recipe = f"{recipe_of(REQUIREMENTS / f'{name}.txt')}{sys.version}"
    return peers_folder(environ) / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def recipe_of(requirements: Path) -> str:
    """The text of a list of requirements, and of those that it includes."""
    lines = requirements.read_text(encoding="utf-8").splitlines(keepends=True)
    included = (line.removeprefix(INCLUDES).strip() for line in lines if line.startswith(INCLUDES))
    return "".join([*lines, *(recipe_of(requirements.with_name(name)) for name in included)])


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a lock beside a path, so that two benches do not make it at once.

    Raises:
        CommandFailedError: The folder cannot be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f"{path.name}.lock").open("w")
    except OSError as error:
        raise CommandFailedError(f"cannot write to {path.parent}: {error.strerror}; set XDG_CACHE_HOME") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(folder: Path, requirements: Path, env: Mapping[str, str]) -> None:
    run_command([sys.executable, "-m", "venv", "--clear", folder], env=env, quiet_s=INSTALL_S)
    pip: list[str | Path] = [_python(folder), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # At the lowest priority: setting up must not disturb what is being measured beside it.
    run_command(["nice", "-n", "19", *pip, "install", "--no-deps", "-r", requirements], env=env, quiet_s=INSTALL_S)


def converted(checkpoint: Path, python: Path, environ: Mapping[str, str], say: Callable[[str], None]) -> Path:
    """Returns a folder with a checkpoint in OpenVINO's format, bf16, which is made now if it is not there.

    Args:
        checkpoint: Hugging Face checkpoint folder.
        python: Python of the environment whose libraries convert.
        environ: Names the cache folder.
        say: Called when something is made.

    Raises:
        CommandFailedError: It cannot be converted.
    """
    say_once = f"converting {checkpoint.name} for OpenVINO, once"
    export: list[str | Path] = [python, python.with_name("optimum-cli"), "export", "openvino", "-m", checkpoint]
    command = [*export, "--task", "text-generation-with-past"]
    return made_by(command, f"{checkpoint.name}-{_digest(checkpoint)}-openvino", environ, lambda: say(say_once))


def made_by(
    command: Sequence[str | Path], name: str, environ: Mapping[str, str], begins: Callable[[], None] = lambda: None
) -> Path:
    """Returns a file or folder of the models' cache, which a command makes now if it is not there.

    Args:
        command: Gets the path to write as its last argument.
        name: Name in the cache.
        environ: Names the cache folder.
        begins: Called when it is made.

    Raises:
        CommandFailedError: It cannot be made.
    """
    out = peers_folder(environ) / "models" / name
    with locked(out):
        if not out.exists():
            begins()
            partial = out.with_name(f"{out.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            run_command([*command, partial], env=child_environ(environ), quiet_s=CONVERT_S)
            os.replace(partial, out)
    return out


def _digest(checkpoint: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(checkpoint.iterdir()):
        if file.suffix in {".json", ".safetensors"}:
            digest.update(file.name.encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:12]
