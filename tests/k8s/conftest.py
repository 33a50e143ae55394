"""The chart's cpu-demo, built and started with podman; run by `make k8s-test`, not with the other tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.k8s.images import REPOSITORY_NAME, build_all
from tests.k8s.kubelet import Kubelet
from tests.k8s.podman import Podman
from tests.unit.k8s.chart import REPOSITORY, Rendered, render, values_files

PROGRAMS = ("podman", "runc", "conmon", "debootstrap")
TAG = "k8s-test"
NETWORK = "paceline-k8s-test"
# Each one's probes pass before the next one starts: a gateway is not ready before its verifier is.
ORDER = ("redis", "drafter", "verifier", "gateway")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds what `make k8s-test ARGS=...` may say."""
    parser.addoption("--keep-images", action="store_true", help="Keep the images in .build/k8s for the next run.")


@pytest.fixture(scope="session")
def podman(request: pytest.FixtureRequest) -> Iterator[Podman]:
    """Podman on a storage below .build, which is gone in the end."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (see docs/kubernetes.md for the packages)")
    if os.geteuid():
        pytest.skip("needs root: networks of containers and debootstrap do")
    podman = Podman.in_folder(REPOSITORY / ".build" / "k8s")
    try:
        yield podman
    finally:
        podman("pod", "rm", "--force", "--all", "--time=5")
        if not request.config.getoption("--keep-images"):
            podman("system", "reset", "--force")
            shutil.rmtree(podman.folder)


@pytest.fixture(scope="session")
def cpu_demo() -> Rendered:
    """The chart as values/cpu-demo.yaml has it, with the images built here."""
    image = {"repository": REPOSITORY_NAME, "tag": TAG, "pullPolicy": "Never"}
    return render({**values_files()["cpu-demo"], "image": image})


@pytest.fixture(scope="session")
def images(podman: Podman, cpu_demo: Rendered) -> dict[str, str]:
    """Names of the images of each tier, built now."""
    build_all(podman, cpu_demo.container("redis")["image"], TAG)
    return {tier: cpu_demo.container(tier)["image"] for tier in ORDER}


@pytest.fixture(scope="session")
def kubelet(
    podman: Podman, cpu_demo: Rendered, images: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kubelet]:
    """All pods of cpu-demo, ready."""
    folder: Path = tmp_path_factory.mktemp("manifests")
    podman("network", "create", NETWORK)
    try:
        kubelet = Kubelet(podman, cpu_demo, folder, NETWORK)
        for tier in ORDER:
            kubelet.start(tier)
        yield kubelet
    finally:
        podman("pod", "rm", "--force", "--all", "--time=5")
        podman("network", "rm", NETWORK)
