"""Users of both doors for Locust, in ramps and spikes; `python -m loadtest locust` starts it.

Each user sends one request after another and reads it token by token. Besides Locust's own rows, one for the whole
request, there are rows of type TTFT (to the first token), ITL (a token after the first; tokens that come at once share
their wait) and E2E. Locust is not open loop: for that see `python -m loadtest load`.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

# Locust has patched the standard library by now; gRPC must know before any channel is made.
import grpc.experimental.gevent

grpc.experimental.gevent.init_gevent()

import grpc  # noqa: E402
from locust.argument_parser import LocustArgumentParser  # noqa: E402
from locust.env import Environment  # noqa: E402

from loadtest.shapes import SHAPES, num_users  # noqa: E402
from locust import FastHttpUser, LoadTestShape, User, between, events, task  # noqa: E402
from paceline.checkpoints.corpus import unseen_prompts  # noqa: E402
from paceline.rpc.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc  # noqa: E402

TIMEOUT_S = 120.0
NUM_PROMPTS = 40
# Each user has a channel: gRPC would put all to one address on one connection.
CHANNEL_OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))


def _flags(parser: LocustArgumentParser) -> None:
    for name, default, about in (
        ("grpc-address", "127.0.0.1:8001", "gRPC door"),
        ("max-tokens", 48, "tokens a request"),
        ("prompt", "", "of all requests; without it unseen source"),
        ("most-users", 8, "most users at once"),
        ("seconds", 60.0, "length of the run"),
    ):
        variable = f"PACELINE_{name.upper().replace('-', '_')}"
        parser.add_argument(f"--{name}", type=type(default), default=default, env_var=variable, help=about)
    parser.add_argument("--shape", choices=SHAPES, default="steady", env_var="PACELINE_SHAPE", help="users over time")


events.init_command_line_parser.add_listener(_flags)


@lru_cache
def _prompts(given: str) -> list[str]:
    return [given] if given else unseen_prompts(NUM_PROMPTS)


class Shape(LoadTestShape):
    """Users over time, by `--shape`."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """Returns how many users there should be now and how fast to get there; None at the end."""
        assert self.runner is not None, "Locust sets it before the first tick"
        options: Any = self.runner.environment.parsed_options
        run_s: float = self.get_run_time()  # type: ignore[no-untyped-call]  # Locust's own
        count = num_users(options.shape, run_s / options.seconds, options.most_users)
        return None if count is None else (count, float(options.most_users))


class Stopwatch:
    """Times of one stream; fires them as rows of their own."""

    def __init__(self, environment: Environment, name: str) -> None:
        self._environment = environment
        self._name = name
        self._started_s = time.perf_counter()
        self._pieces: list[tuple[float, int]] = []

    def tokens(self, count: int) -> None:
        """Notes that tokens have just come."""
        if count:
            self._pieces.append((time.perf_counter(), count))

    def end(self, wanted: int, error: Exception | None = None) -> None:
        """The stream has ended; too few tokens are an error, too."""
        ended_s = time.perf_counter()
        num_tokens = sum(count for _, count in self._pieces)
        if error is None and num_tokens != wanted:
            error = ValueError(f"{num_tokens} of {wanted} tokens")
        self._fire("E2E", ended_s - self._started_s, num_tokens, error)
        if error is not None or not self._pieces:
            return
        self._fire("TTFT", self._pieces[0][0] - self._started_s, 1, None)
        for (sooner_s, _), (later_s, count) in pairwise(self._pieces):
            for _ in range(count):
                self._fire("ITL", (later_s - sooner_s) / count, 1, None)

    def _fire(self, kind: str, seconds: float, length: int, error: Exception | None) -> None:
        self._environment.events.request.fire(
            request_type=kind,
            name=self._name,
            response_time=1000.0 * seconds,
            response_length=length,
            exception=error,
            context={},
        )


class HttpUser(FastHttpUser):
    """Streams completions over HTTP and server-sent events, read by line."""

    wait_time = between(0.0, 0.2)
    # Locust wants one; `--host` overrides it.
    host = "http://127.0.0.1:8000"

    @task
    def complete(self) -> None:
        """Sends a completion request."""
        options = self.environment.parsed_options
        prompt, wanted = random.choice(_prompts(options.prompt)), options.max_tokens
        watch = Stopwatch(self.environment, "http")
        body = {
            "prompt": prompt,
            "max_tokens": wanted,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        with self.client.post("/v1/completions", json=body, stream=True, catch_response=True) as response:
            try:
                for count in _counts(response):
                    watch.tokens(count)
                watch.end(wanted)
                response.success()
            except (OSError, ValueError) as error:
                watch.end(wanted, error)
                response.failure(error)


def _counts(response: Any) -> Iterator[int]:
    """Yields how many tokens each event brings."""
    if response.status_code != 200:
        raise ValueError(f"status {response.status_code}: {response.text[:200]}")
    total = 0
    # By line: reads of a fixed size wait until all of it has come, and overstate the time to the first token.
    while line := response.stream.readline(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            raise ValueError(str(event["error"]))
        now = (event.get("usage") or {}).get("completion_tokens", total)
        yield now - total
        total = now


class GrpcUser(User):
    """Streams completions through the gateway's gRPC door."""

    wait_time = between(0.0, 0.2)

    def on_start(self) -> None:
        """Opens a channel of its own."""
        address = self.environment.parsed_options.grpc_address
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = gateway_pb2_grpc.GatewayStub(self._channel)

    def on_stop(self) -> None:
        """Closes it."""
        self._channel.close()

    @task
    def generate(self) -> None:
        """Sends a completion request."""
        options = self.environment.parsed_options
        prompt, wanted = random.choice(_prompts(options.prompt)), options.max_tokens
        watch = Stopwatch(self.environment, "grpc")
        request = gateway_pb2.GatewayGenerateRequest(
            prompt=prompt,
            sampling=common_pb2.SamplingParams(max_tokens=wanted, temperature=1.0, ignore_eos=True),
        )
        try:
            for response in self._stub.Generate(request, timeout=TIMEOUT_S):
                watch.tokens(len(response.token_ids))
            watch.end(wanted)
        except grpc.RpcError as error:
            watch.end(wanted, error)
