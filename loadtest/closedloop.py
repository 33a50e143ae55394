"""So many streams at a time, the next request when one ends: over a gateway's gRPC door, and simulated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc
from tqdm import tqdm

from paceline.planning.profile import Profile
from paceline.planning.simulation import Fleet, FleetAtWork, Outcome
from paceline.planning.verifier import Request
from paceline.rpc.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from paceline.service.process import CHANNEL_OPTIONS

TIMEOUT_S = 300.0
NS_PER_S = 1e9

Prompts = Sequence[Sequence[int]]


async def closed_loop(
    address: str, prompts: Prompts, *, max_tokens: int, streams: int, speculation: bool, title: str
) -> tuple[Outcome, float]:
    """Runs all requests, greedy and to their full length.

    Args:
        address: gRPC door of a gateway.
        prompts: Token ids of each request.
        max_tokens: Tokens of each answer.
        streams: Requests under way at once.
        speculation: Whether they allow it.
        title: Of the progress bar.

    Returns:
        What came, in the simulator's own terms, and the seconds that a first token spends outside the verifier
        (median).
    """
    work = enumerate(prompts)
    asked: list[Request] = []
    doors_s: list[float] = []
    started_s = time.perf_counter()
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(channel)
        with tqdm(total=len(prompts), desc=title, unit="request", leave=False) as bar:

            async def stream() -> None:
                for number, prompt in work:
                    at_s = time.perf_counter() - started_s
                    each = Request(number=number, at_s=at_s, num_prompt_tokens=1, num_output_tokens=max_tokens)
                    asked.append(each)
                    doors_s.append(await _run(stub, each, _request(prompt, max_tokens, speculation), started_s))
                    bar.update()

            await asyncio.gather(*(stream() for _ in range(streams)))
    outcome = Outcome(requests=asked, door_s=0.0, since_s=0.0, until_s=_until_one_idles(asked))
    return outcome, sorted(doors_s)[len(doors_s) // 2]


def _request(prompt: Sequence[int], max_tokens: int, speculation: bool) -> gateway_pb2.GatewayGenerateRequest:
    return gateway_pb2.GatewayGenerateRequest(
        prompt_token_ids=gateway_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        speculation=common_pb2.SpeculationParams(enabled=speculation),
    )


async def _run(
    stub: gateway_pb2_grpc.GatewayAsyncStub,
    asked: Request,
    request: gateway_pb2.GatewayGenerateRequest,
    started_s: float,
) -> float:
    door_s = 0.0
    async for response in stub.Generate(request, timeout=TIMEOUT_S):
        if response.token_ids:
            asked.pieces.append((time.perf_counter() - started_s, len(response.token_ids)))
        if response.HasField("result"):
            record, timings = response.result.speculation, response.result.timings
            # The first token comes from the prompt's step, which verifies nothing.
            asked.num_steps = record.num_steps - 1
            asked.num_drafted, asked.num_accepted = record.num_draft_tokens, record.num_accepted_draft_tokens
            inside_s = (timings.queue_ns + timings.prefill_ns) / NS_PER_S
            door_s = asked.pieces[0][0] - asked.at_s - inside_s
    return door_s


def simulated_loop(
    profile: Profile, fleet: Fleet, lengths: Sequence[tuple[int, int]], *, streams: int, seed: int = 0
) -> Outcome:
    """The same in simulated time.

    Args:
        profile: Facts.
        fleet: Replicas.
        lengths: Prompt and output tokens of each request, in order.
        streams: How many at a time.
        seed: Of the luck.
    """
    asked: list[Request] = []
    left = iter(enumerate(lengths))

    def ask_next(_: Request | None = None) -> None:
        number, (num_prompt_tokens, num_output_tokens) = next(left, (-1, (0, 0)))
        if number < 0:
            return
        each = Request(
            number=number,
            at_s=work.events.now_s,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_output_tokens,
        )
        asked.append(each)
        # A request is on its way to the verifier for as long as its first token is on its way back.
        work.events.after(profile.door_s, lambda: work.ask(each))

    work = FleetAtWork(profile, fleet, seed, ask_next)
    for _ in range(streams):
        ask_next()
    work.events.run()
    return Outcome(requests=asked, door_s=0.0, since_s=0.0, until_s=_until_one_idles(asked))


def _until_one_idles(asked: Sequence[Request]) -> float:
    """The time at which the first stream found no request left to send."""
    last_s = max(each.at_s for each in asked)
    return min(each.pieces[-1][0] for each in asked if each.pieces[-1][0] > last_s)
