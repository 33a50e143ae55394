"""Runs the tests of this folder in an environment with vLLM, set up in the user's cache folder: `make vllm-test`.

`python -m tests.vllm [--set-up] [arguments of pytest]`; with `--set-up` nothing is run, and the exit status says
whether vLLM can be had here.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import paceline
from tools.environments import child_environ, environment
from tools.processes import CommandFailedError

ROOT = Path(__file__).parents[2]
METADATA = ROOT / ".build" / "vllm-test"
ENVIRONMENT, SET_UP = "vllm-test", "--set-up"


def main() -> None:
    """Sets up, and becomes pytest."""
    try:
        python = environment(ENVIRONMENT, os.environ, _say)
    except CommandFailedError as error:
        raise SystemExit(f"vLLM cannot be set up: {error}") from None
    if SET_UP in sys.argv:
        return
    path = [str(ROOT / "services"), str(ROOT), str(write_metadata(METADATA))]
    env = child_environ(os.environ) | {"PYTHONPATH": os.pathsep.join(path)}
    os.chdir(ROOT)
    # Warnings of vLLM and of what it imports are not ours.
    ours = ["-o", "testpaths=tests/vllm", "-m", "vllm", "-W", "default"]
    pytest = [str(python), "-m", "pytest", *ours, *sys.argv[1:]]
    os.execve(pytest[0], pytest, env)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def write_metadata(folder: Path) -> Path:
    """Writes what an installed package says of its entry points, since vLLM looks plug-ins up there; the folder."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = paceline.__version__
    info = folder / f"paceline-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: paceline\nVersion: {version}\n", encoding="utf-8")
    lines = []
    for group, points in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return folder


if __name__ == "__main__":
    main()
