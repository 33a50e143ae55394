"""The rendered cpu-demo as running containers: images, probes, a completion, and a drafter that is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.client.generate import GenerateConfig, stream
from tests.k8s.conftest import rendered_demo, running
from tests.k8s.kubelet import Kubelet, container_name
from tests.k8s.podman import Podman, PodmanError
from tests.unit.k8s.chart import TIERS

pytestmark = [pytest.mark.podman, pytest.mark.timeout(3600)]

PROMPT = "def read_lines(path):\n    "
NUM_TOKENS = 96
LONG = 1200
MOST_TEXTS = 8
LOOK_INSIDE = """
import importlib.util, json, os, shutil
print(json.dumps({
    "user": os.getuid(),
    "demo": os.path.isfile("/opt/paceline/models/demo-target/config.json"),
    "torch": importlib.util.find_spec("torch") is not None,
    "tools": [name for name in ("pip", "pip3", "gcc", "cc", "ld", "make", "git", "curl") if shutil.which(name)],
    "modules": [name for name in ("pip", "setuptools", "hatchling", "pytest") if importlib.util.find_spec(name)],
}))
"""


@pytest.fixture(scope="module")
def kubelet(podman: Podman, images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubelet]:
    """All pods of cpu-demo, ready."""
    with running(podman, rendered_demo(), tmp_path_factory.mktemp("manifests")) as kubelet:
        yield kubelet


class Texts:
    """Texts of the fleet, and what speculation did for the last one."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.record: dict[str, Any] = {}

    def pieces(self, num_tokens: int = NUM_TOKENS, **settings: Any) -> Any:
        """Streams one text."""
        asked = GenerateConfig(prompt=PROMPT, url=self._url, max_tokens=num_tokens, temperature=0.8, seed=7, **settings)
        for chunk in stream(asked):
            self.record = (chunk.get("metrics") or {}).get("speculative_decoding") or self.record
            for choice in chunk["choices"]:
                yield choice["text"]

    def whole(self, num_tokens: int = NUM_TOKENS, **settings: Any) -> str:
        """Streams one text to its end."""
        return "".join(self.pieces(num_tokens, **settings))


@pytest.fixture
def texts(kubelet: Kubelet) -> Texts:
    return Texts(kubelet.url())


@pytest.mark.parametrize("tier", TIERS)
def test_an_image_holds_no_build_tools_and_the_gateway_no_torch(
    podman: Podman, images: dict[str, str], tier: str
) -> None:
    inside = json.loads(
        podman("run", "--rm", "--network=none", "--entrypoint=python3", images[tier], "-c", LOOK_INSIDE)
    )
    assert inside == {"user": 10001, "demo": True, "torch": tier != "gateway", "tools": [], "modules": []}


@pytest.mark.parametrize("tier", ["verifier", "drafter"])
def test_a_model_service_is_ready_only_once_its_model_is_loaded(kubelet: Kubelet, tier: str) -> None:
    states = [state for state in kubelet.states[tier] if state != "unreachable"]
    assert states == ["NOT_SERVING", "ready"]


def test_all_probes_of_the_chart_pass(kubelet: Kubelet) -> None:
    asked = {
        (tier, kind): kubelet.ask(tier, kind)
        for tier in kubelet.rendered.workloads
        for kind in ("startupProbe", "readinessProbe", "livenessProbe")
        if kind in kubelet.rendered.container(tier)
    }
    assert len(asked) == 11
    assert set(asked.values()) == {"ready"}


@pytest.mark.parametrize("tier", TIERS)
def test_a_container_writes_to_tmp_and_nowhere_else(kubelet: Kubelet, tier: str) -> None:
    kubelet.run_in(tier, "touch", "/tmp/allowed")
    for folder in ("/", "/opt/paceline", "/var/tmp", "/home"):
        with pytest.raises(PodmanError, match="Read-only file system"):
            kubelet.run_in(tier, "touch", f"{folder}/refused")


def test_a_completion_is_streamed_and_speculation_changes_nothing_in_it(texts: Texts) -> None:
    # This target takes 4 ms a step: first trials of drafting may have lost their allowance before the drafter answers.
    for _ in range(MOST_TEXTS):
        pieces = list(texts.pieces(LONG, method="draft_model"))
        if texts.record["num_accepted_draft_tokens"]:
            break
    assert len(pieces) > 1
    assert texts.record["num_accepted_draft_tokens"] > 0
    assert texts.whole(LONG, speculation=False) == "".join(pieces)


def test_a_stream_outlives_the_kill_of_the_drafter_and_a_new_one_drafts_again(kubelet: Kubelet, texts: Texts) -> None:
    undisturbed = texts.whole(LONG, method="draft_model")
    pieces = texts.pieces(LONG, method="draft_model")
    head = [next(pieces) for _ in range(5)]
    kubelet.podman("kill", container_name("drafter"))
    assert "".join([*head, *pieces]) == undisturbed
    assert fallbacks(kubelet) > 0

    texts.whole(method="draft_model")
    assert texts.record.get("num_draft_tokens", 0) == 0
    kubelet.restart("drafter")
    assert drafts_again(texts)


def test_pods_are_drained_by_their_pre_stop_hook_and_end_by_themselves(kubelet: Kubelet, texts: Texts) -> None:
    for tier in ("drafter", "verifier"):
        hook = kubelet.rendered.container(tier)["lifecycle"]["preStop"]["exec"]["command"]
        assert "is drained" in kubelet.run_in(tier, *hook)
    for tier in TIERS:
        kubelet.podman("stop", "--time=60", container_name(tier))
        assert kubelet.podman.inspect(container_name(tier))["State"]["ExitCode"] == 0


def fallbacks(kubelet: Kubelet) -> float:
    """Sessions that the verifier took on without their drafter."""
    return sum(
        float(line.split()[-1]) for line in metrics(kubelet).splitlines() if line.startswith("paceline:fallbacks_total")
    )


def metrics(kubelet: Kubelet) -> str:
    """The verifier's metrics, read by the gateway's container, which the NetworkPolicy allows."""
    address = f"http://paceline-verifier:{kubelet.rendered.ports('verifier')['metrics']}/metrics"
    return kubelet.run_in("gateway", "python3", "-c", f"import httpx; print(httpx.get({address!r}).text)")


def drafts_again(texts: Texts) -> bool:
    """Whether one of the next texts has draft tokens; the verifier dials a new drafter within a second."""
    for _ in range(60):
        texts.whole(method="draft_model")
        if texts.record["num_draft_tokens"] > 0:
            return True
    return False
