"""The peers' own environments: made once in the user's cache folder, found again by the digest of what they hold.

Requirements are complete lists, installed without resolving: no peer can pull in a CUDA torch, or a torchvision that
does not fit it. torch==2.13.0 is the CPU build where pip is told of one, as for our own constraints.txt.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from loadtest.peers.processes import CommandFailedError, run_command
from paceline.cluster.checkpoints import cache_folder

REQUIREMENTS = Path(__file__).parent / "requirements"
INSTALL_S = 900.0
BUILD_S = 2400.0
LLAMA_SOURCE = "llama-cpp-python==0.3.36"
LLAMA_SETTINGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # it would be downloaded
)
READY = ".ready"
INCLUDES = "-r "
# Ours would lead a peer astray, or (bytecode) make every start of it slower.
DROPPED_PREFIXES = ("PACELINE_", "PYTHON", "OMP_", "KMP_", "VIRTUAL_ENV", "LD_PRELOAD")


def peers_folder(environ: Mapping[str, str]) -> Path:
    """Where environments and converted models are kept; safe to remove."""
    return cache_folder(environ) / "peers"


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
            _make(name, folder, REQUIREMENTS / f"{name}.txt", child_environ(environ))
            (folder / READY).touch()
    return _python(folder)


def known_environment(name: str, environ: Mapping[str, str]) -> Path | None:
    """Returns the Python of a peer's environment that is there already; None: it is not."""
    folder = _folder(name, environ)
    return _python(folder) if (folder / READY).is_file() else None


def _folder(name: str, environ: Mapping[str, str]) -> Path:
    recipe = f"{recipe_of(REQUIREMENTS / f'{name}.txt')}{sys.version}{LLAMA_SETTINGS if name == 'llama-cpp' else ''}"
    return peers_folder(environ) / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def recipe_of(requirements: Path) -> str:
    """The text of a list of requirements, and of those that it includes."""
    lines = requirements.read_text(encoding="utf-8").splitlines(keepends=True)
    included = (line.removeprefix(INCLUDES).strip() for line in lines if line.startswith(INCLUDES))
    return "".join([*lines, *(recipe_of(requirements.with_name(name)) for name in included)])


def nicely(command: list[str | Path]) -> list[str | Path]:
    """The command at the lowest priority: setting up must not disturb what is being measured beside it."""
    nice = shutil.which("nice")
    return [nice, "-n", "19", *command] if nice else command


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


def _make(name: str, folder: Path, requirements: Path, env: Mapping[str, str]) -> None:
    if name == "llama-cpp" and shutil.which("c++") is None:
        raise CommandFailedError("llama.cpp has no prebuilt package, and there is no C++ compiler (c++) to build it")
    run_command([sys.executable, "-m", "venv", "--clear", folder], env=env, quiet_s=INSTALL_S)
    pip: list[str | Path] = [folder / "bin" / "python", "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run_command(nicely([*pip, "install", "--no-deps", "-r", requirements]), env=env, quiet_s=INSTALL_S)
    if name == "llama-cpp":
        _build_llama_server(folder, pip, env)


def _build_llama_server(folder: Path, pip: list[str | Path], env: Mapping[str, str]) -> None:
    """Builds llama.cpp's server from the source that llama-cpp-python carries: its Python API takes no draft model."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch_name:
        scratch = Path(scratch_name)
        fetch = [*pip, "download", "--no-deps", "--no-binary", ":all:", "--dest", scratch, LLAMA_SOURCE]
        run_command(nicely(fetch), env=env, quiet_s=INSTALL_S)
        with tarfile.open(next(scratch.glob("*.tar.gz"))) as archive:
            archive.extractall(scratch, filter="data")
        source = next(scratch.glob("*/vendor/llama.cpp"))
        tools = {**env, "PATH": f"{folder / 'bin'}{os.pathsep}{env.get('PATH', '')}"}
        cmake = folder / "bin" / "cmake"
        build = scratch / "build"
        run_command(
            nicely([cmake, "-G", "Ninja", "-S", source, "-B", build, *LLAMA_SETTINGS]), env=tools, quiet_s=INSTALL_S
        )
        command = nicely([cmake, "--build", build, "--target", "llama-server", "-j", str(os.cpu_count() or 1)])
        run_command(command, env=tools, quiet_s=BUILD_S)
        shutil.move(build / "bin" / "llama-server", folder / "bin" / "llama-server")
    (folder / "bin" / "llama-server.version").write_text(f"that of {LLAMA_SOURCE}\n", encoding="utf-8")
