"""A fleet on a Ray cluster of a head and three nodes: placed and moved while clients stream, no token lost.

All nodes are on this machine and each its own set of Ray's processes. The launcher is `paceline up --ray` itself; what
it prints is all that is known of it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from loadtest.histories import History, judge
from loadtest.steadfast import Request, keep_running, over, run_each

from paceline.client.resuming import ResumingClient
from paceline.rpc.v1 import common_pb2

pytestmark = pytest.mark.full

WAIT_S = 180.0
NUM_STREAMS = 4
WELL = re.compile(r"(\S+) is well: node (\w+), (?:http (\S+), )?grpc (\S+?)(?:, metrics (\S+))?, pid (\d+)")
# Nodes are told apart by their custom resources. Only the head has one of everything; it is the smallest node, which
# Ray fills last.
HEAD = {"front": 1.0, "verifier-gpu": 1.0, "drafter-gpu": 1.0}
NODES = ({"verifier-gpu": 1.0}, {"verifier-gpu": 1.0}, {"drafter-gpu": 1.0})
SMALL = {"object_store_memory": 80 * 1024 * 1024, "include_dashboard": False}
SYSTEM = {
    # A dead node is found in seconds; by default it takes a quarter of a minute.
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    # Idle workers, one a CPU, that nobody here would use.
    "prestart_worker_first_driver": False,
}
SOURCES = str(Path(__file__).parents[2] / "services")
SPEC: dict[str, Any] = {
    # Of the devices nothing but their pace matters here, and services without torch are ready sooner.
    "simulate": "8b+0.5b@h100+l4",
    "redis_port": 0,
    "grace_s": 5,
    "gateway_port": 0,
    "gateway_grpc_port": 0,
    "num_verifiers": 2,
    "verifier_arg": ["--num-kv-blocks=128"],
    "drafter_arg": ["--num-kv-blocks=128"],
    "ray": {
        "gateway": {"cpus": 0.2, "resources": {"front": 1}},
        "verifier": {"cpus": 0.2, "resources": {"verifier-gpu": 1}},
        "drafter": {"cpus": 0.2, "resources": {"drafter-gpu": 1}},
    },
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a replica was last said to be well; `http` has its metrics."""

    node: str
    http: str
    grpc: str
    pid: int


class Launcher:
    """`paceline up --ray` as a process."""

    def __init__(self, address: str, file: Path) -> None:
        self.lines: list[str] = []
        self.places: dict[str, Place] = {}
        self.pids: set[int] = set()
        self._heard = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline", "up", "--ray", address, "--fleet", str(file)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.until(lambda: any("is up on Ray" in line for line in self.lines) or self.process.poll() is not None)
        assert self.process.poll() is None, "\n".join(self.lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._heard:
                self.lines.append(line.rstrip())
                if match := WELL.match(line):
                    name, node, http, grpc, metrics, pid = match.groups()
                    self.places[name] = Place(node=node, http=http or metrics, grpc=grpc, pid=int(pid))
                    self.pids.add(int(pid))
                self._heard.notify_all()

    def until(self, holds: Callable[[], object]) -> None:
        with self._heard:
            assert self._heard.wait_for(holds, WAIT_S), "\n".join(self.lines)

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(60)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


@dataclass
class RayFleetOnTest:
    """The cluster and the fleet on it."""

    cluster: Any
    launcher: Launcher

    @property
    def gateway(self) -> str:
        """Where clients stream from."""
        return self.launcher.places["gateway-0"].grpc

    def node_of(self, replica: str) -> Any:
        """The node of the cluster that a replica is on."""
        place = self.launcher.places[replica]
        nodes = [self.cluster.head_node, *self.cluster.worker_nodes]
        return next(node for node in nodes if node.node_id.startswith(place.node))

    def resources_of(self, replica: str) -> dict[str, float]:
        """The custom resources of the node that a replica is on."""
        resources = self.node_of(replica).get_resource_and_label_spec().resources
        return {name: amount for name, amount in resources.items() if name in HEAD}

    def cut_power(self, replica: str) -> None:
        """Ends all processes of a replica's node at once."""
        node, pid = self.node_of(replica), self.launcher.places[replica].pid
        (actor,) = re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        self.cluster.remove_node(node, allow_graceful=False)
        os.kill(int(actor), signal.SIGKILL)

    def stream_while(self, disturb: Callable[[], None]) -> list[History]:
        """Streams run, each again and again, while a thread disturbs the fleet."""

        async def story() -> list[History]:
            async with ResumingClient([self.gateway], patience_s=WAIT_S, silence_s=WAIT_S) as client:
                disturbing = asyncio.create_task(asyncio.to_thread(disturb))
                streams = await keep_running([over(client)], requests(), disturbing.done, lambda _: None)
                await disturbing
                return streams

        return asyncio.run(story())

    def failovers(self) -> float:
        return self.total("gateway-0", "paceline:failovers_total")

    def total(self, name: str, metric: str) -> float:
        """Sum of a metric of a service over its labels."""
        page = httpx.get(f"http://{self.launcher.places[name].http}/metrics", trust_env=False).text
        return sum(float(line.rpartition(" ")[2]) for line in re.findall(rf"^{metric}.*$", page, re.M))

    def busy_verifier(self) -> str:
        """Waits until a verifier has streams under way; returns its name.

        Which one that is nobody can say: a verifier that knows all prompts may have twice its share of the sessions,
        and of two that is all of them.
        """
        deadline_s = time.monotonic() + WAIT_S
        while True:
            for name in ("verifier-0", "verifier-1"):
                if self.total(name, "vllm:num_requests_running"):
                    return name
            assert time.monotonic() < deadline_s, "no verifier got a stream"
            time.sleep(0.02)


def requests() -> list[Request]:
    """Half of them sampled, each with a prompt and a seed of its own."""
    return [
        Request(
            prompt=f"stream number {index}: ",
            sampling=common_pb2.SamplingParams(
                max_tokens=160, temperature=0.8 * (index % 2), ignore_eos=True, seed=index
            ),
            speculation=common_pb2.SpeculationParams(enabled=True, acceptance="coupled"),
        )
        for index in range(NUM_STREAMS)
    ]


def left(pids: Iterable[int]) -> list[int]:
    """The processes that are still there."""
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head and three nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Ray runs its workers, and so our services, at niceness 15 unless told otherwise.
        patch.setenv("RAY_worker_niceness", "0")
        # Workers of Ray import this checkout.
        patch.setenv("PYTHONPATH", os.pathsep.join([SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])]))
        from ray.cluster_utils import Cluster

        cluster = Cluster(
            initialize_head=True,
            head_node_args={**SMALL, "num_cpus": 1, "resources": HEAD, "_system_config": SYSTEM},
        )
        try:
            for resources in NODES:
                cluster.add_node(wait=False, **SMALL, num_cpus=2, resources=resources)
            cluster.wait_for_nodes()
            yield cluster
        finally:
            cluster.shutdown()


@pytest.fixture(scope="module")
def fleet(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayFleetOnTest]:
    file = tmp_path_factory.mktemp("ray") / "fleet.yaml"
    file.write_text(yaml.safe_dump(SPEC))
    with Launcher(cluster.address, file) as launcher:
        yield RayFleetOnTest(cluster, launcher)


def undisturbed(fleet: RayFleetOnTest) -> list[History]:
    """What the streams bring when nothing happens."""

    async def story() -> list[History]:
        async with ResumingClient([fleet.gateway]) as client:
            return await run_each(over(client), requests())

    streams = asyncio.run(story())
    assert [stream.error for stream in streams] == [""] * NUM_STREAMS
    assert [len(stream.token_ids) for stream in streams] == [160] * NUM_STREAMS
    return streams


@pytest.fixture(scope="module")
def reference(fleet: RayFleetOnTest) -> list[History]:
    return undisturbed(fleet)


def test_each_service_is_on_a_node_with_its_resources_and_verifiers_on_two(fleet: RayFleetOnTest) -> None:
    assert fleet.node_of("gateway-0") is fleet.cluster.head_node
    assert fleet.node_of("verifier-0") is not fleet.node_of("verifier-1")
    assert [fleet.resources_of(f"verifier-{number}") for number in (0, 1)] == [{"verifier-gpu": 1.0}] * 2
    assert fleet.resources_of("drafter-0") == {"drafter-gpu": 1.0}


def test_a_drafter_whose_node_dies_is_placed_elsewhere_and_no_token_changes(
    fleet: RayFleetOnTest, reference: list[History]
) -> None:
    before = fleet.launcher.places["drafter-0"]

    def kill() -> None:
        fleet.cut_power("drafter-0")
        fleet.launcher.until(lambda: fleet.launcher.places["drafter-0"] != before)

    streams = fleet.stream_while(kill)
    assert judge(streams, reference).clean, [stream.error for stream in streams if stream.error]
    assert fleet.node_of("drafter-0") is fleet.cluster.head_node


def test_a_verifier_whose_node_dies_under_streams_costs_no_token(
    fleet: RayFleetOnTest, reference: list[History]
) -> None:
    failovers, killed = fleet.failovers(), []

    def kill() -> None:
        verifier = fleet.busy_verifier()
        before = fleet.launcher.places[verifier]
        killed.append(verifier)
        fleet.cut_power(verifier)
        fleet.launcher.until(lambda: fleet.launcher.places[verifier] != before)

    streams = fleet.stream_while(kill)
    assert judge(streams, reference).clean, [stream.error for stream in streams if stream.error]
    assert fleet.failovers() > failovers, "no stream was hit"
    assert fleet.node_of(killed[0]) is fleet.cluster.head_node


def test_ctrl_c_leaves_no_process_and_the_cluster_as_it_was(fleet: RayFleetOnTest) -> None:
    assert fleet.launcher.stop() == 0
    assert fleet.launcher.lines[-1] == "stopped"
    assert left(fleet.launcher.pids) == []
    groups = fleet.cluster.global_state.placement_group_table()
    assert {group["state"] for group in groups.values()} == {"REMOVED"}
