"""A fleet of real processes: it comes up, restarts what dies and leaves nothing behind.

Devices are simulated where nothing depends on the model: such services are ready sooner.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import ssl
import sys
from pathlib import Path

import httpx
import pytest

from paceline.cluster.checkpoints import resolve_checkpoints
from paceline.cluster.foreground import describe_models
from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import FleetSpec
from paceline.core.errors import ConfigError
from paceline.service.config import load
from paceline.service.dev_ca import make_certificates
from tests.support.hub import Repo, serving

PORTS = ("gateway", "gateway-grpc", "verifier", "verifier-metrics", "drafter", "drafter-metrics", "redis")
FREE_PORTS = [word for port in PORTS for word in (f"--{port}-port", "0")]
SIMULATED = [*FREE_PORTS, "--simulate", "8b+0.5b@h100+l4"]
SMALL = ["--dtype", "float32", *("--verifier-arg=--num-kv-blocks=64", "--drafter-arg=--num-kv-blocks=64")]


def arguments(tiny_pair: tuple[Path, Path]) -> list[str]:
    target, draft = tiny_pair
    return [*FREE_PORTS, *SMALL, "--model", str(target), "--draft-model", str(draft)]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def gone(pid: int) -> None:
    async with asyncio.timeout(30):
        while Path(f"/proc/{pid}").exists():  # noqa: ASYNC110 - the kernel gives no event for it
            await asyncio.sleep(0.01)


async def complete(fleet: LocalFleet, authority: Path | None = None) -> str:
    return await completion(fleet.gateway_url, fleet.model_name, authority)


async def completion(url: str, model: str, authority: Path | None = None) -> str:
    """Asks until there is an answer: a gateway learns of a new verifier at its next look."""
    verify = False if authority is None else ssl.create_default_context(cafile=authority)
    body = {"model": model, "prompt": "hello", "max_tokens": 12, "temperature": 0.8, "seed": 5}
    async with httpx.AsyncClient(trust_env=False, timeout=60, verify=verify) as client, asyncio.timeout(60):
        while True:
            response = await client.post(f"{url}/v1/completions", json=body)
            if response.status_code == httpx.codes.OK:
                return str(response.json()["choices"][0]["text"])
            assert response.status_code == httpx.codes.SERVICE_UNAVAILABLE, response.text
            await asyncio.sleep(0.1)


@pytest.mark.full
async def test_a_fleet_restarts_what_dies_and_leaves_nothing_behind() -> None:
    said: list[str] = []
    spec = load(FleetSpec, SIMULATED, {}, "up", "")
    async with LocalFleet(spec, environ=os.environ, say=said.append) as fleet:
        before = await complete(fleet)
        for role in ("verifier", "valkey"):
            fleet.kill(role)
            await fleet.until_restarted(role, 1)
            assert await complete(fleet) == before
        assert [line.split(";")[0] for line in said if "start" not in line.split(";")[0]] == [
            "verifier-0 was ended by SIGKILL",
            "valkey was ended by SIGKILL",
        ]
        assert (fleet.restart_count("verifier"), fleet.restart_count("drafter")) == (1, 0)
        pids = [fleet.pid(endpoint.name) for endpoint in fleet.endpoints]
        logs = fleet.log_dir
        assert (logs / "gateway-0.log").exists()
    assert len(pids) == 4
    for pid in pids:
        await gone(pid)
    assert not logs.exists()


@pytest.mark.full
async def test_a_fleet_with_certificates_speaks_tls_everywhere(tmp_path: Path) -> None:
    folder = tmp_path / "ca"
    make_certificates(folder)
    own = folder / "gateway"
    tls = ["--tls-dir", str(folder), "--tls-cert", str(own / "tls.pem"), "--tls-key", str(own / "tls.key")]
    spec = load(FleetSpec, [*SIMULATED, *tls, "--log-dir", str(tmp_path / "logs")], {}, "up", "")
    async with LocalFleet(spec, environ=os.environ) as fleet:
        assert fleet.gateway_url.startswith("https://")
        assert await complete(fleet, folder / "ca.pem")
        verifier_log = tmp_path / "logs" / "verifier-0.log"
        async with asyncio.timeout(30):
            while "stream to drafter is up" not in verifier_log.read_text():  # noqa: ASYNC110 - a file gives no event
                await asyncio.sleep(0.05)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.full
@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine's loopback")
async def test_a_fleet_serves_over_ipv6() -> None:
    """TensorRT-LLM #10877: store, services, their health and the registry's addresses, all on ::1."""
    spec = load(FleetSpec, [*SIMULATED, "--host", "::1"], {}, "up", "")
    async with LocalFleet(spec, environ=os.environ) as fleet:
        assert fleet.gateway_url.startswith("http://[::1]:")
        assert await complete(fleet)
        assert await fleet.is_well("drafter")


@pytest.mark.full
async def test_a_service_that_cannot_start_is_reported_and_its_log_stays(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    argv = [*arguments(tiny_pair), "--log-dir", str(tmp_path / "logs"), "--verifier-arg=--max-model-len=9999999"]
    fleet = LocalFleet(load(FleetSpec, argv, {}, "up", ""), environ=os.environ)
    with pytest.raises(ConfigError, match=r"^verifier-0 cannot start: [^|=]*max-model-len [^|]* \(log: "):
        await fleet.__aenter__()
    assert "max-model-len" in (tmp_path / "logs" / "verifier-0.log").read_text()


async def test_a_store_that_does_not_answer_is_named_before_anything_is_started(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    argv = [*arguments(tiny_pair), "--log-dir", str(tmp_path / "logs"), "--redis-url", "redis://127.0.0.1:1"]
    fleet = LocalFleet(load(FleetSpec, argv, {}, "up", ""), environ=os.environ)
    with pytest.raises(ConfigError, match=r"^the store at 127\.0\.0\.1:1 cannot be used .* --redis-url$"):
        await fleet.__aenter__()
    assert list((tmp_path / "logs").iterdir()) == []


async def up(*argv: str, **env: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "paceline", "up", *argv),
        env=os.environ | {"PYTHONPATH": "services", "PACELINE_GRACE_S": "10"} | env,
        stdout=asyncio.subprocess.PIPE,
    )


async def printed_until_up(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    lines: list[str] = []
    async with asyncio.timeout(120):
        while "Ctrl-C" not in (lines or [""])[-1]:
            lines.append((await process.stdout.readline()).decode())
            assert lines[-1], f"it ended before it was up: {lines}"
    return "".join(lines)


async def test_up_prints_where_it_listens_and_stops_on_ctrl_c() -> None:
    process = await up(*SIMULATED, "--no-drafter")
    text = await printed_until_up(process)
    # On a busy machine it also says that one still starts.
    started = [line for line in text.splitlines() if line.startswith("starting")]
    assert started == ["starting valkey", "starting verifier-0", "starting gateway-0"]
    assert "is up" in text
    assert "simulated     8b+0.5b@h100+l4: steps take a device's time, nothing is computed" in text
    assert "curl -N http://127.0.0.1:" in text
    pids = children(process.pid)
    process.send_signal(signal.SIGINT)
    rest, _ = await asyncio.wait_for(process.communicate(), 60)
    assert rest.decode().splitlines()[-2:] == [
        "stopping: running requests get up to 8 s to finish, all of it 10 s; Ctrl-C again ends everything at once",
        "stopped",
    ]
    assert process.returncode == 0
    assert len(pids) == 3
    for pid in pids:
        await gone(pid)


@pytest.mark.full
async def test_a_second_ctrl_c_ends_a_fleet_at_once_while_a_stream_runs() -> None:
    process = await up(*SIMULATED, "--no-drafter", PACELINE_GRACE_S="600")
    text = await printed_until_up(process)
    url = re.findall(r"http://127\.0\.0\.1:\d+", text)[0]
    pids = children(process.pid)
    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as stream:
            await anext(aiter(stream.aiter_lines()))
            process.send_signal(signal.SIGINT)
            assert process.stdout is not None
            async with asyncio.timeout(60):
                assert b"Ctrl-C again" in await process.stdout.readline()
                process.send_signal(signal.SIGINT)
                assert await process.wait() == 130
    for pid in pids:
        await gone(pid)


def test_the_models_of_a_fleet_are_named(tiny_pair: tuple[Path, Path]) -> None:
    for last, named in (("--drafter", "drafter"), ("--no-drafter", "none; verifiers draft by themselves")):
        spec = load(FleetSpec, [*arguments(tiny_pair), last], {}, "up", "")
        lines = describe_models(resolve_checkpoints(spec, {}, print))
        assert lines[0].startswith("target model  target")
        assert lines[1] == f"draft model   {named}"


@pytest.mark.full
async def test_ctrl_c_during_the_start_ends_what_was_started(tmp_path: Path) -> None:
    process = await up(*SIMULATED, "--log-dir", str(tmp_path))
    async with asyncio.timeout(60):
        while not (tmp_path / "drafter-0.log").exists():  # noqa: ASYNC110 - a file gives no event
            await asyncio.sleep(0.01)
    pids = children(process.pid)
    process.send_signal(signal.SIGTERM)
    printed, _ = await asyncio.wait_for(process.communicate(), 60)
    assert printed.decode().splitlines() == ["starting valkey", "starting verifier-0, drafter-0", "stopped"]
    assert process.returncode == 0
    assert pids
    for pid in pids:
        await gone(pid)


@pytest.mark.full
async def test_models_of_the_hub_are_fetched_at_the_first_start_and_served_offline_at_the_second(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, draft = tiny_pair
    argv = [*FREE_PORTS, *SMALL, "--model", "org/target", "--draft-model", "hf://org/drafter@main"]
    texts = []
    with serving(target=Repo.of(target), drafter=Repo.of(draft)) as hub:
        for offline in ("0", "1"):
            process = await up(*argv, HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path), HF_HUB_OFFLINE=offline)
            printed = await printed_until_up(process)
            for name in ("target", "drafter"):
                says_so = re.search(rf"org/{name}\S*: what is not in .* is fetched from {hub.url}", printed)
                assert (says_so is not None) == (offline == "0"), printed
            assert "target model  org/target (" in printed
            assert "draft model   org/drafter" in printed
            url = printed.partition("curl -N ")[2].partition("/v1/")[0]
            texts.append(await completion(url, "org/target"))
            process.send_signal(signal.SIGINT)
            await asyncio.wait_for(process.communicate(), 60)
            assert bool(hub.requests) == (offline == "0")
            hub.requests.clear()
    assert texts[0] == texts[1]
