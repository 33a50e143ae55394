"""nginx before a gateway that has one place: streams that wait, HTTP/1.0 and 1.1 to the gateway, and gRPC."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from openai import OpenAI

from paceline.rpc.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

# nginx's own default is 60 s; the fleet's gateway pings after 0.1 s.
READ_TIMEOUT_S = 2
SETTINGS = """
daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/errors;
events {{}}
http {{
  access_log off;
  {temporary}
  upstream kept {{ server {http}; keepalive 4; }}
  server {{
    listen 127.0.0.1:{ports[0]};
    location / {{ proxy_pass http://{http}; proxy_read_timeout {timeout}s; }}
  }}
  server {{
    listen 127.0.0.1:{ports[1]};
    location / {{
      proxy_pass http://kept;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_read_timeout {timeout}s;
    }}
  }}
  server {{
    listen 127.0.0.1:{ports[2]} http2;
    location / {{ grpc_pass grpc://{grpc}; }}
  }}
}}
"""
KINDS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
OLD, KEPT, GRPC = range(3)

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="needs nginx, Debian's package nginx-light")


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture(scope="module")
def ports(queued, tmp_path_factory) -> Iterator[list[int]]:
    """Where nginx listens: HTTP/1.0 to the gateway, as by default; 1.1, over connections that are kept; gRPC."""
    folder: Path = tmp_path_factory.mktemp("nginx")
    found = free_ports(3)
    settings = SETTINGS.format(
        folder=folder,
        temporary=" ".join(f"{kind}_temp_path {folder}/{kind};" for kind in KINDS),
        http=queued.url.removeprefix("http://"),
        grpc=queued.grpc,
        ports=found,
        timeout=READ_TIMEOUT_S,
    )
    (folder / "nginx.conf").write_text(settings)
    with subprocess.Popen(["nginx", "-c", folder / "nginx.conf", "-e", folder / "errors"]) as process:
        try:
            for port in found:
                await_listener(port)
            yield found
        finally:
            process.terminate()


def await_listener(port: int) -> None:
    until_s = time.monotonic() + 30
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)


def asked(queued: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Tell me a story."}]
    return {"model": queued.model, "messages": messages, "max_tokens": 120, "ignore_eos": True, "seed": 3, **more}


def streamed(port: int, body: dict[str, Any]) -> tuple[int, str]:
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=120, trust_env=False)
    return answer.status_code, answer.text


@pytest.mark.parametrize("door", [OLD, KEPT], ids=["HTTP/1.0", "HTTP/1.1"])
def test_streams_that_wait_for_the_only_place_are_served(queued, ports, door) -> None:
    """Three of four got 504."""
    body = asked(queued, stream=True)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: streamed(ports[door], body), range(6)))
    assert [status for status, _ in answers] == [200] * 6
    assert all(text.endswith("data: [DONE]\n\n") for _, text in answers)
    assert any(text.startswith(": ping\n\n") for _, text in answers)
    assert len({contents(text) for _, text in answers}) == 1


def contents(text: str) -> str:
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for each in chunks for choice in each["choices"])


@pytest.mark.parametrize("door", [OLD, KEPT], ids=["HTTP/1.0", "HTTP/1.1"])
def test_answers_of_openai_s_client_are_those_of_the_gateway(queued, ports, door) -> None:
    direct, behind = (
        OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        for url in (queued.v1, f"http://127.0.0.1:{ports[door]}/v1")
    )
    body = asked(queued)
    del body["ignore_eos"]
    wanted = direct.chat.completions.create(**body).choices[0].message.content
    assert behind.chat.completions.create(**body).choices[0].message.content == wanted
    chunks = list(behind.chat.completions.create(**body, stream=True))
    assert "".join(choice.delta.content or "" for each in chunks for choice in each.choices) == wanted
    # Refusals, too.
    assert streamed(ports[door], {**asked(queued), "model": "unknown"})[0] == 404
    assert streamed(ports[door], asked(queued, temperature=-1))[0] == 400


def test_grpc_streams_its_tokens(queued, ports) -> None:
    sampling = common_pb2.SamplingParams(max_tokens=20, seed=3)
    request = gateway_pb2.GatewayGenerateRequest(prompt="Once", sampling=sampling)
    texts = []
    for address in (queued.grpc, f"127.0.0.1:{ports[GRPC]}"):
        with grpc.insecure_channel(address) as channel:
            answers = list(gateway_pb2_grpc.GatewayStub(channel).Generate(request, timeout=120))
        texts.append("".join(each.text for each in answers))
        assert answers[-1].HasField("result")
    assert texts[0] == texts[1]
