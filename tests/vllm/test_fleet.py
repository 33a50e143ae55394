"""The whole fleet with vLLM in its verifiers: one is killed under streams, and no token is lost, doubled or changed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from paceline.checkpoints.corpus import unseen_prompts
from paceline.client import rehearse
from paceline.cluster.checkpoints import DEMO_DRAFTER
from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import FREE_PORTS, FleetSpec
from paceline.core.draft_policy import REHEARSED
from paceline.core.errors import PacelineError
from paceline.rpc.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from paceline.service.process import CHANNEL_OPTIONS
from paceline.vllm.places import mode_sockets
from tests.support.fuzzing import until
from tests.vllm.client import ACCEPTED
from tools.scrape import scrape

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

STREAMS, NUM_TOKENS = 16, 96
ANSWER_S = 240.0
VERIFIER_ARGS = ("--max-num-seqs=16", "--max-model-len=512", "--learned-dir=none", "--vllm-arg=--enforce-eager")


def fleet_of(target, num_verifiers: int = 2, *more: str) -> LocalFleet:
    spec = FleetSpec(
        **FREE_PORTS,
        model=target,
        draft_model=DEMO_DRAFTER,
        verifier_engine="vllm",
        num_verifiers=num_verifiers,
        dtype="float32",
        verifier_arg=(*VERIFIER_ARGS, *more),
    )
    return LocalFleet(spec, environ=os.environ)


async def streamed(fleet: LocalFleet, prompt: str, on_tokens: Callable[[int], None] = lambda _: None) -> list[int]:
    """Token ids of a greedy completion, as the gateway sent them, with its own count of them."""
    asked = gateway_pb2.GatewayGenerateRequest(
        prompt=prompt,
        sampling=common_pb2.SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
    )
    tokens: list[int] = []
    address = fleet.endpoint("gateway").second_address
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        async for piece in gateway_pb2_grpc.GatewayStub(channel).Generate(asked, timeout=ANSWER_S):
            tokens += piece.token_ids
            on_tokens(len(piece.token_ids))
    return tokens


async def until_drafted(fleet: LocalFleet, prompt: str) -> None:
    """Keeps one stream running until a verifier has accepted guesses."""
    async with asyncio.timeout(ANSWER_S):
        while not await accepted(fleet):
            await streamed(fleet, prompt)


async def accepted(fleet: LocalFleet) -> float:
    counts = [await scrape(each.second_address) for each in fleet.endpoints_of("verifier")]
    return sum(count[ACCEPTED] for count in counts)


async def test_a_verifier_is_killed_under_16_streams_and_every_token_is_accounted_for(target) -> None:
    prompts = unseen_prompts(STREAMS)
    async with fleet_of(target) as fleet:
        await until_drafted(fleet, prompts[0])
        expected = await asyncio.gather(*(streamed(fleet, prompt) for prompt in prompts))
        come = 0

        def kill_in_mid_text(count: int) -> None:
            nonlocal come
            before, come = come, come + count
            if before < STREAMS * NUM_TOKENS // 3 <= come:
                fleet.kill("verifier-0")

        found = await asyncio.gather(*(streamed(fleet, prompt, kill_in_mid_text) for prompt in prompts))
        gateway = await scrape(fleet.gateway_url.removeprefix("http://"))
        assert fleet.restart_count("verifier-1") == 0
        await fleet.until_restarted("verifier-0", 1)
    assert [len(tokens) for tokens in expected] == [NUM_TOKENS] * STREAMS
    assert found == expected
    assert gateway["paceline:failovers_total"] > 0


async def test_at_a_gateway_each_request_says_whether_it_is_guessed_for(target) -> None:
    (prompt,) = unseen_prompts(1)
    async with fleet_of(target, 1, "--rehearse=off") as fleet:
        async with asyncio.timeout(ANSWER_S):
            while not counts_of(drafted := await answer(fleet, prompt))["num_draft_tokens"]:
                pass
        off = await answer(fleet, prompt, speculation={"enabled": False})
        biased = await answer(fleet, prompt, logit_bias={"225": 1.0}, min_p=0.1, temperature=0.5)
    assert off["choices"][0]["text"] == drafted["choices"][0]["text"]
    for said in (off, biased):
        counts = counts_of(said)
        assert (counts["num_draft_tokens"], counts["num_accepted_draft_tokens"]) == (0, 0)


def counts_of(said: dict[str, Any]) -> dict[str, Any]:
    counts: dict[str, Any] = said["metrics"]["speculative_decoding"]
    return counts


async def answer(fleet: LocalFleet, prompt: str, **more: Any) -> dict[str, Any]:
    """A completion over HTTP."""
    body = {"model": fleet.model_name, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, **more}
    async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as http:
        found = await http.post(f"{fleet.gateway_url}/v1/completions", json=body)
    assert found.status_code == httpx.codes.OK, found.text
    said: dict[str, Any] = found.json()
    return said


async def helper_beside(others: set[Path]) -> Path:
    """The socket of the helper that has come since there were those."""
    await until(lambda: {*mode_sockets()} - others)
    (path,) = {*mode_sockets()} - others
    return path


async def test_vllm_in_a_verifier_is_rehearsed_through_its_gateway(target, capsys) -> None:
    others = {*mode_sockets()}
    async with fleet_of(target, 1, "--rehearse=off") as fleet:
        path = await helper_beside(others)
        capsys.readouterr()
        await asyncio.to_thread(rehearse.main, [fleet.gateway_url, "--streams", "2", "--helper", str(path)])
        _, *lines = capsys.readouterr().out.splitlines()
        async with rehearse.listening([path]) as (helper,):
            assert all(min(helper.rates[load]) > 0.0 for load in range(2))
    assert [int(line.split()[0]) for line in lines] == [1, 2]


async def test_it_rehearses_by_itself_and_serves_meanwhile(target) -> None:
    (prompt,) = unseen_prompts(1)
    others = {*mode_sockets()}
    async with fleet_of(target, 1, "--rehearse=idle") as fleet:
        path = await helper_beside(others)
        assert len(await streamed(fleet, prompt)) == NUM_TOKENS
        counted = await generated(fleet)
        await until_rehearsed(path)
        # Nobody sees what it did: 1, 2, 4, 8 and 16 sessions in both modes.
        assert await generated(fleet) == counted == NUM_TOKENS
        assert len(await streamed(fleet, prompt)) == NUM_TOKENS


async def until_rehearsed(path: Path) -> None:
    async with asyncio.timeout(ANSWER_S):
        while True:
            if await has_rehearsed(path):
                return
            await asyncio.sleep(1.0)


async def has_rehearsed(path: Path) -> bool:
    try:
        async with rehearse.listening([path]) as (helper,):
            return len(helper.rates) >= 5 and bool(helper.learned["policy"][REHEARSED])
    except PacelineError:
        # It is told by its verifier at the moment.
        return False


async def generated(fleet: LocalFleet) -> float:
    """Tokens of users that the verifier has counted."""
    (endpoint,) = fleet.endpoints_of("verifier")
    return (await scrape(endpoint.second_address))["vllm:generation_tokens_total"]
