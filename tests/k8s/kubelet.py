"""What a kubelet does for the chart's pods, done with podman: starts them, fills in fields, asks their probes.

What podman 4.3 cannot play is changed first, and nothing else: a pod template is played as a Pod, whatever workload it
is of; Secrets become ConfigMaps, and are written out where arguments name them; the pod's address is its name on the
network; probes are asked from here; ports are not listed, since podman would open each on this machine.

A tier names its first replica, `verifier-1` the second.
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
        states: What the readiness probe of each replica said from the start until it was ready, repetitions left out.
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
        names = [name for tier in tiers for name in self.replicas(tier)]
        for name in names:
            self._play(name)
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.until_ready, names))

    def replicas(self, tier: str) -> list[str]:
        """Names of the replicas of a tier."""
        count = self.rendered.workloads[tier]["spec"].get("replicas", 1)
        return [tier, *(f"{tier}-{number}" for number in range(1, count))]

    def restart(self, name: str) -> None:
        """Starts a container that has ended, and waits as at its first start; its pod may get another address.

        Raises:
            TimeoutError: It is not ready in the time that the startup probe gives.
        """
        self._addresses.pop(name, None)
        self.podman("start", container_name(name))
        self.until_ready(name)

    def until_ready(self, name: str) -> None:
        """Waits for the readiness probe.

        Raises:
            TimeoutError: It does not pass in the time that the startup probe gives.
        """
        startup = self.rendered.container(tier_of(name)).get(
            "startupProbe", {"periodSeconds": 2, "failureThreshold": 60}
        )
        deadline_s = time.monotonic() + startup["periodSeconds"] * startup["failureThreshold"]
        states = self.states.setdefault(name, [])
        for state in self._states(name):
            if states[-1:] != [state]:
                states.append(state)
            if state == "ready":
                return
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{name} is not ready ({states}): {self.logs(name)}")
            time.sleep(POLL_S)

    def ask(self, name: str, kind: str) -> str:
        """Asks a probe of a replica: `ready`, or why not."""
        tier = tier_of(name)
        probe = self.rendered.container(tier)[kind]
        address = self._address(name)
        if "grpc" in probe:
            return _ask_grpc(f"{address}:{probe['grpc']['port']}", probe["grpc"].get("service", ""))
        if "httpGet" in probe:
            get = probe["httpGet"]
            return _ask_http(
                f"{get['scheme'].lower()}://{address}:{self.rendered.ports(tier)[get['port']]}{get['path']}"
            )
        if "tcpSocket" in probe:
            return _ask_tcp(address, self.rendered.ports(tier)[probe["tcpSocket"]["port"]])
        return self._ask_inside(name, probe["exec"]["command"])

    def run_in(self, name: str, *command: str) -> str:
        """Runs a command in a container, as an exec hook does; returns what it prints."""
        return self.podman("exec", container_name(name), *command)

    def logs(self, name: str) -> str:
        """The end of what a container said."""
        return self.podman("logs", "--tail=20", container_name(name))

    def url(self) -> str:
        """Where the gateway serves HTTP."""
        return f"http://{self._address('gateway')}:{self.rendered.ports('gateway')['http']}"

    def _play(self, name: str) -> None:
        manifest = self.folder / f"{name}.yaml"
        manifest.write_text(yaml.safe_dump_all(self._playable(name), sort_keys=False))
        self.podman("kube", "play", "--network", f"{self.network}:alias={RELEASE}-{name}", str(manifest))

    def _address(self, name: str) -> str:
        """Address of a pod, which it keeps while it lives."""
        if name not in self._addresses:
            self._addresses[name] = self.podman.address(pod_name(name))
        return self._addresses[name]

    def _states(self, name: str) -> Iterator[str]:
        while True:
            yield self.ask(name, "readinessProbe")

    def _ask_inside(self, name: str, command: list[str]) -> str:
        try:
            self.run_in(name, *command)
        except PodmanError:
            return "unreachable"
        return "ready"

    def _playable(self, name: str) -> list[Document]:
        secrets = [
            {**secret, "kind": "ConfigMap", "data": secret["stringData"]}
            for secret in (*self.rendered.of_kind("Secret"), *self.secrets)
        ]
        template = copy.deepcopy(self.rendered.pod(tier_of(name)))
        container = template["spec"]["containers"][0]
        container["env"] = [_filled(entry, f"{RELEASE}-{name}") for entry in container.get("env", ())]
        container.pop("ports")
        passwords = {key: value for secret in secrets for key, value in secret["data"].items()}
        container["args"] = [_written_out(each, container["env"], passwords) for each in container.get("args", ())]
        template["spec"]["volumes"] = [_playable_volume(volume, name) for volume in template["spec"]["volumes"]]
        for mount in container["volumeMounts"]:
            mount["name"] = f"{name}-{mount['name']}"
        metadata = {"name": pod_name(name), "labels": template["metadata"]["labels"]}
        return [*secrets, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}]


def tier_of(name: str) -> str:
    """The tier of a replica."""
    return name.partition("-")[0]


def pod_name(name: str) -> str:
    """Name of a replica's pod."""
    return f"{RELEASE}-{name}" if "-" in name else f"{RELEASE}-{name}-0"


def container_name(name: str) -> str:
    """Name that podman gives to its container."""
    return f"{pod_name(name)}-{tier_of(name)}"


def _playable_volume(volume: dict[str, Any], name: str) -> dict[str, Any]:
    """An emptyDir is a volume of its name to podman, which pods would share but for the replica in it."""
    played = {**volume, "name": f"{name}-{volume['name']}"}
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


def _ask_tcp(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return "unreachable"
    return "ready"


def _ask_http(url: str) -> str:
    try:
        with httpx.Client(timeout=PROBE_TIMEOUT_S, trust_env=False, verify=False) as client:
            status = client.get(url).status_code
    except httpx.HTTPError:
        return "unreachable"
    return "ready" if status == HTTP_OK else f"status {status}"
