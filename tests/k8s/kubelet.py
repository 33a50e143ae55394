"""What a kubelet does for the chart's pods, done with podman: starts them, fills in fields, asks their probes.

What podman 4.3 cannot play is changed first, and nothing else: a pod template is played as a Pod, whatever workload it
is of; Secrets become ConfigMaps, and are written out where arguments name them; the pod's address is its name on the
network; probes are asked from here; ports are not listed, since podman would open each on this machine.

Each tier has one replica.
"""

from __future__ import annotations

import copy
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.k8s.podman import Podman, PodmanError
from tests.unit.k8s.chart import RELEASE, Document, Rendered

PROBE_TIMEOUT_S = 5.0
POLL_S = 0.2
HTTP_OK = 200


@dataclass
class Kubelet:
    """Runs one release.

    Attributes:
        podman: Runs the pods.
        rendered: The chart's documents.
        folder: For files that podman reads.
        network: Its network; Services are names on it.
        secrets: Secrets that the chart does not make.
        states: What the readiness probe of each tier said from the start until it was ready, repetitions left out.
    """

    podman: Podman
    rendered: Rendered
    folder: Path
    network: str
    secrets: tuple[Document, ...] = ()
    states: dict[str, list[str]] = field(default_factory=dict)
    _addresses: dict[str, str] = field(default_factory=dict)

    def start(self, *tiers: str) -> None:
        """Plays the pods of tiers and waits until their readiness probes pass.

        Raises:
            TimeoutError: One does not in the time that its startup probe gives.
        """
        for tier in tiers:
            self._play(tier)
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.until_ready, tiers))

    def restart(self, tier: str) -> None:
        """Starts a container that has ended, and waits as at its first start; its pod may get another address.

        Raises:
            TimeoutError: It is not ready in the time that the startup probe gives.
        """
        self._addresses.pop(tier, None)
        self.podman("start", container_name(tier))
        self.until_ready(tier)

    def until_ready(self, tier: str) -> None:
        """Waits for the readiness probe.

        Raises:
            TimeoutError: It does not pass in the time that the startup probe gives.
        """
        startup = self.rendered.container(tier).get("startupProbe", {"periodSeconds": 2, "failureThreshold": 60})
        deadline_s = time.monotonic() + startup["periodSeconds"] * startup["failureThreshold"]
        states = self.states.setdefault(tier, [])
        for state in self._states(tier):
            if states[-1:] != [state]:
                states.append(state)
            if state == "ready":
                return
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{tier} is not ready ({states}): {self.logs(tier)}")
            time.sleep(POLL_S)

    def ask(self, tier: str, kind: str) -> str:
        """Asks a probe of a replica: `ready`, or why not."""
        probe = self.rendered.container(tier)[kind]
        address = self._address(tier)
        if "grpc" in probe:
            return _ask_grpc(f"{address}:{probe['grpc']['port']}", probe["grpc"].get("service", ""))
        if "httpGet" in probe:
            get = probe["httpGet"]
            return _ask_http(
                f"{get['scheme'].lower()}://{address}:{self.rendered.ports(tier)[get['port']]}{get['path']}"
            )
        if "tcpSocket" in probe:
            return _ask_tcp(address, self.rendered.ports(tier)[probe["tcpSocket"]["port"]])
        return self._ask_inside(tier, probe["exec"]["command"])

    def run_in(self, tier: str, *command: str) -> str:
        """Runs a command in a container, as an exec hook does; returns what it prints."""
        return self.podman("exec", container_name(tier), *command)

    def logs(self, tier: str) -> str:
        """The end of what a container said."""
        return self.podman("logs", "--tail=20", container_name(tier))

    def url(self) -> str:
        """Where the gateway serves HTTP."""
        return f"http://{self._address('gateway')}:{self.rendered.ports('gateway')['http']}"

    def _play(self, tier: str) -> None:
        manifest = self.folder / f"{tier}.yaml"
        manifest.write_text(yaml.safe_dump_all(self._playable(tier), sort_keys=False))
        self.podman("kube", "play", "--network", f"{self.network}:alias={RELEASE}-{tier}", str(manifest))

    def _address(self, tier: str) -> str:
        """Address of a pod, which it keeps while it lives."""
        if tier not in self._addresses:
            self._addresses[tier] = self.podman.address(f"{RELEASE}-{tier}-0")
        return self._addresses[tier]

    def _states(self, tier: str) -> Iterator[str]:
        while True:
            yield self.ask(tier, "readinessProbe")

    def _ask_inside(self, tier: str, command: list[str]) -> str:
        try:
            self.run_in(tier, *command)
        except PodmanError:
            return "unreachable"
        return "ready"

    def _playable(self, tier: str) -> list[Document]:
        secrets = [
            {**secret, "kind": "ConfigMap", "data": secret["stringData"]}
            for secret in (*self.rendered.of_kind("Secret"), *self.secrets)
        ]
        template = copy.deepcopy(self.rendered.pod(tier))
        container = template["spec"]["containers"][0]
        container["env"] = [_filled(entry, f"{RELEASE}-{tier}") for entry in container.get("env", ())]
        container.pop("ports")
        passwords = {key: value for secret in secrets for key, value in secret["data"].items()}
        container["args"] = [_written_out(each, container["env"], passwords) for each in container.get("args", ())]
        template["spec"]["volumes"] = [_playable_volume(volume, tier) for volume in template["spec"]["volumes"]]
        for mount in container["volumeMounts"]:
            mount["name"] = f"{tier}-{mount['name']}"
        metadata = {"name": f"{RELEASE}-{tier}-0", "labels": template["metadata"]["labels"]}
        return [*secrets, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}]


def container_name(tier: str) -> str:
    """Name that podman gives to its container."""
    return f"{RELEASE}-{tier}-0-{tier}"


def _playable_volume(volume: dict[str, Any], tier: str) -> dict[str, Any]:
    """An emptyDir is a volume of its name to podman, which pods would share but for the tier in it."""
    played = {**volume, "name": f"{tier}-{volume['name']}"}
    secret = played.pop("secret", None)
    if secret is not None:
        played["configMap"] = {("name" if key == "secretName" else key): value for key, value in secret.items()}
    return played


def _written_out(argument: str, env: list[dict[str, Any]], values: dict[str, str]) -> str:
    for entry in env:
        if "configMapKeyRef" in entry.get("valueFrom", {}):
            argument = argument.replace(f"$({entry['name']})", values[entry["valueFrom"]["configMapKeyRef"]["key"]])
    return argument


def _filled(entry: dict[str, Any], service: str) -> dict[str, Any]:
    source = entry.get("valueFrom", {})
    if "secretKeyRef" in source:
        return {"name": entry["name"], "valueFrom": {"configMapKeyRef": source["secretKeyRef"]}}
    if source.get("fieldRef", {}).get("fieldPath") == "status.podIP":
        return {"name": entry["name"], "value": service}
    if "value" in entry:
        return {**entry, "value": entry["value"].replace("$(POD_IP)", service)}
    return entry


def _ask_tcp(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return "unreachable"
    return "ready"


def _ask_grpc(address: str, service: str) -> str:
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=PROBE_TIMEOUT_S, wait_for_ready=False
            )
        except grpc.RpcError:
            return "unreachable"
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return "ready" if serving else health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def _ask_http(url: str) -> str:
    try:
        with httpx.Client(timeout=PROBE_TIMEOUT_S, trust_env=False, verify=False) as client:
            status = client.get(url).status_code
    except httpx.HTTPError:
        return "unreachable"
    return "ready" if status == HTTP_OK else f"status {status}"
