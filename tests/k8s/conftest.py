"""The chart's cpu-demo, built and started with podman; run by `make k8s-test`, not with the other tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.images import REPOSITORY_NAME, build_all
from tests.k8s.kubelet import Kubelet
from tests.k8s.podman import Podman
from tests.unit.k8s.chart import REPOSITORY, TIERS, Document, Rendered, render, values_files

PROGRAMS = ("podman", "runc", "conmon", "debootstrap", "ip")
# What a container is made of; a sandbox may forbid it though it lets podman be installed.
NAMESPACES = ("unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "true")
TAG = "k8s-test"
NETWORK = "paceline-k8s-test"
STORE = "redis"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what `make k8s-test ARGS=...` may say."""
    parser.addoption(
        "--keep-images", action="store_true", help="Keep images in .build/k8s, and use those of an earlier run."
    )


@pytest.fixture(scope="session")
def podman(request: pytest.FixtureRequest) -> Iterator[Podman]:
    """Podman on a storage below .build, which is gone in the end."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (see docs/kubernetes.md for the packages)")
    if os.geteuid():
        pytest.skip("needs root: networks of containers and debootstrap do")
    refusal = subprocess.run(NAMESPACES, capture_output=True, text=True, check=False)
    if refusal.returncode:
        pytest.skip(f"this machine lets nobody start a container: {refusal.stderr.strip()}")
    podman = Podman.in_folder(REPOSITORY / ".build" / "k8s")
    try:
        yield podman
    finally:
        podman("pod", "rm", "--force", "--all", "--time=5")
        if not request.config.getoption("--keep-images"):
            podman.remove()


def rendered_demo(**values: Any) -> Rendered:
    """The chart as values/cpu-demo.yaml has it, with the images built here and values beside."""
    demo = values_files()["cpu-demo"]
    beside = {name: {**demo.get(name, {}), **given} for name, given in values.items()}
    return render({**demo, **beside, "image": {"repository": REPOSITORY_NAME, "tag": TAG, "pullPolicy": "Never"}})


@pytest.fixture(scope="session")
def images(request: pytest.FixtureRequest, podman: Podman) -> dict[str, str]:
    """Names of the images of each tier, built now."""
    rendered = rendered_demo()
    names = {tier: rendered.container(tier)["image"] for tier in (STORE, *TIERS)}
    if not (request.config.getoption("--keep-images") and all(map(podman.has_image, names.values()))):
        build_all(podman, names[STORE], TAG)
    return names


@contextmanager
def running(podman: Podman, rendered: Rendered, folder: Path, secrets: Sequence[Document] = ()) -> Iterator[Kubelet]:
    """All pods of a release while a block runs, ready at its start."""
    podman("network", "create", NETWORK)
    try:
        kubelet = Kubelet(podman, rendered, folder, NETWORK, tuple(secrets))
        kubelet.start(STORE)
        podman.keep_bridge_address(NETWORK)
        kubelet.start("verifier", "drafter")
        # Ready only when a verifier is.
        kubelet.start("gateway")
        yield kubelet
    finally:
        podman("pod", "rm", "--force", "--all", "--time=5")
        podman("network", "rm", NETWORK)
        podman("volume", "prune", "--force")
