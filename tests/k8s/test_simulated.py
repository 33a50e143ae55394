"""The rendered values/simulated.yaml as containers: three verifiers and two drafters without torch, 64 streams."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.k8s.conftest import built, rendered_with_own_images, running
from tests.k8s.kubelet import Kubelet, container_name
from tests.k8s.podman import Podman
from tests.unit.k8s.chart import Rendered, values_files

pytestmark = [pytest.mark.podman, pytest.mark.timeout(3600)]

NUM_STREAMS, NUM_TOKENS = 64, 160
HAS_TORCH = "import importlib.util; print(importlib.util.find_spec('torch') is not None)"


@pytest.fixture(scope="module")
def rendered() -> Rendered:
    return rendered_with_own_images(values_files()["simulated"])


@pytest.fixture(scope="module")
def images(request: pytest.FixtureRequest, podman: Podman, rendered: Rendered) -> dict[str, str]:
    return built(request, podman, rendered)


@pytest.fixture(scope="module")
def kubelet(
    podman: Podman, rendered: Rendered, images: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kubelet]:
    """All pods, ready."""
    assert images
    with running(podman, rendered, tmp_path_factory.mktemp("simulated")) as kubelet:
        yield kubelet


def complete(kubelet: Kubelet, number: int) -> str:
    """The text of one request."""
    body = {"model": "simulated-70b", "prompt": f"request {number}, ", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    response = httpx.post(f"{kubelet.url()}/v1/completions", json=body, timeout=120, trust_env=False)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def all_texts(kubelet: Kubelet, pool: ThreadPoolExecutor) -> list[Any]:
    return [pool.submit(complete, kubelet, number) for number in range(NUM_STREAMS)]


@pytest.mark.parametrize("tier", ["verifier", "drafter"])
def test_the_images_of_simulated_devices_hold_no_torch(podman: Podman, images: dict[str, str], tier: str) -> None:
    shown = podman("run", "--rm", "--network=none", "--entrypoint=python3", images[tier], "-c", HAS_TORCH)
    assert shown == "False"


def test_three_verifiers_and_two_drafters_say_that_they_are_simulated(kubelet: Kubelet) -> None:
    assert (len(kubelet.replicas("verifier")), len(kubelet.replicas("drafter"))) == (3, 2)
    [model] = httpx.get(f"{kubelet.url()}/v1/models", trust_env=False).json()["data"]
    assert (model["id"], model["simulated"]) == ("simulated-70b", True)


def test_64_texts_are_the_same_when_a_verifier_and_a_drafter_are_killed_under_them(kubelet: Kubelet) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        undisturbed = [each.result() for each in all_texts(kubelet, pool)]
        assert len(set(undisturbed)) == NUM_STREAMS
        running_texts = all_texts(kubelet, pool)
        time.sleep(1.0)
        for name in ("verifier-1", "drafter"):
            kubelet.podman("kill", container_name(name))
        assert [each.result() for each in running_texts] == undisturbed
