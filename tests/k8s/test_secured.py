"""The same with mutual TLS between the tiers, TLS and an API key at the doors, from Secrets as on a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.gateway.access.keys import KeyConfig, line_of, new_key
from paceline.service.dev_ca import make_certificates
from tests.k8s.conftest import rendered_demo, running
from tests.k8s.kubelet import Kubelet
from tests.k8s.podman import Podman, PodmanError
from tests.unit.k8s.chart import TIERS, Document

pytestmark = [pytest.mark.podman, pytest.mark.timeout(3600)]

DOORS = "doors"
# The container's PACELINE_MODEL is meant for the gateway.
GENERATE = ("paceline", "generate", "class Stack:", "--model=demo", "--max-tokens=24", "--url=https://127.0.0.1:8000")
CA_FILE = "/etc/paceline/tls/ca.pem"


def secret(name: str, folder: Path) -> Document:
    """A Secret as cert-manager makes it."""
    files = {"ca.crt": "ca.pem", "tls.crt": "tls.pem", "tls.key": "tls.key"}
    data = {key: (folder / file).read_text() for key, file in files.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}


@pytest.fixture(scope="module")
def key() -> str:
    return new_key()


@pytest.fixture(scope="module")
def kubelet(
    podman: Podman, images: dict[str, str], key: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kubelet]:
    """All pods of a fleet without an open door."""
    folder = tmp_path_factory.mktemp("secured")
    make_certificates(folder / "certs")
    secrets = [
        *(secret(f"paceline-{tier}-tls", folder / "certs" / tier) for tier in TIERS),
        secret(DOORS, folder / "certs" / "gateway"),
    ]
    lines = [line_of(KeyConfig(name="alice"), key)]
    rendered = rendered_demo(
        tls={"enabled": True},
        redis={"password": "the-store-has-one-too"},
        gateway={"tlsSecret": DOORS, "apiKeys": {"lines": lines}},
    )
    with running(podman, rendered, folder, secrets) as kubelet:
        yield kubelet


def test_probes_need_no_certificate(kubelet: Kubelet) -> None:
    """They have passed before this test begins; the port beside them lets nobody in."""
    assert {kubelet.ask(tier, "livenessProbe") for tier in kubelet.rendered.workloads} == {"ready"}


def test_a_key_opens_the_door_and_nothing_else_does(kubelet: Kubelet, key: str) -> None:
    shown = kubelet.run_in("gateway", "env", f"PACELINE_API_KEY={key}", *GENERATE, f"--ca-file={CA_FILE}")
    assert shown
    with pytest.raises(PodmanError, match="API key is required"):
        kubelet.run_in("gateway", *GENERATE, f"--ca-file={CA_FILE}")


def test_a_drafters_certificate_opens_no_verifier(kubelet: Kubelet) -> None:
    """Health is open to every tier, `Verify` to gateways alone."""
    with pytest.raises(PodmanError, match="PERMISSION_DENIED"):
        kubelet.run_in("drafter", "python3", "-c", CALL_A_VERIFIER)


CALL_A_VERIFIER = """
import asyncio
from pathlib import Path
from paceline.service.credentials import channel, load_tls
from paceline.rpc.v1 import verifier_pb2_grpc

async def main():
    tls = load_tls(Path("/etc/paceline/tls"), "drafter")
    async with channel("paceline-verifier:8101", tls=tls, role="verifier") as opened:
        # No message: one that the refusal overtakes costs gRPC the reason.
        call = verifier_pb2_grpc.VerifierStub(opened).Verify(timeout=5)
        await call.read()

asyncio.run(main())
"""
