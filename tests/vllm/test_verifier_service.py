"""Verifiers with vLLM inside, behind a gateway and without drafters: what clients ask for and get, whatever ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import FREE_PORTS, FleetSpec
from tools.procfs import children_of
from tools.scrape import scrape

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

MODEL = Path(__file__).parents[2] / "services" / "paceline" / "models" / "demo-target"
STREAMS, NUM_TOKENS = 6, 200
ANSWER_S = 120.0
RUNNING = "vllm:num_requests_running"


@asynccontextmanager
async def fleet_of(num_verifiers: int) -> AsyncIterator[LocalFleet]:
    spec = FleetSpec(
        **FREE_PORTS,
        model=MODEL,
        drafter=False,
        verifier_engine="vllm",
        num_verifiers=num_verifiers,
        dtype="float32",
        speculative_config='{"num_speculative_tokens": 0}',
        verifier_arg=("--max-num-seqs=8", "--max-model-len=512", "--vllm-arg=--enforce-eager"),
    )
    async with LocalFleet(spec, environ=os.environ) as fleet:
        yield fleet


@dataclass(slots=True)
class Answer:
    """What a streamed completion has brought."""

    text: str = ""
    num_tokens: int = 0
    speculation: dict[str, Any] = field(default_factory=dict)


def completion(fleet: LocalFleet, prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": fleet.model_name, "prompt": prompt, "max_tokens": 16, "temperature": 0, **more}


async def ask(fleet: LocalFleet, **more: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as client:
        body = completion(fleet, "def read_lines(path):", **more)
        return await client.post(f"{fleet.gateway_url}/v1/completions", json=body)


async def streamed(fleet: LocalFleet, prompt: str, on_piece: Callable[[], None] = lambda: None, **more: Any) -> Answer:
    """A whole text in pieces."""
    more = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "stream_options": {"include_usage": True}, **more}
    body, answer = completion(fleet, prompt, stream=True, **more), Answer()
    async with (
        httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as client,
        client.stream("POST", f"{fleet.gateway_url}/v1/completions", json=body) as lines,
    ):
        async for line in lines.aiter_lines():
            if not line.startswith("data: {"):
                continue
            piece = json.loads(line.removeprefix("data: "))
            assert "error" not in piece, piece
            answer.text += "".join(choice["text"] for choice in piece["choices"])
            answer.num_tokens = (piece.get("usage") or {}).get("completion_tokens", answer.num_tokens)
            answer.speculation |= (piece.get("metrics") or {}).get("speculative_decoding") or {}
            on_piece()
    return answer


async def undisturbed_and_with(fleet: LocalFleet, disturb: Callable[[], None], **more: Any) -> list[list[Answer]]:
    """The same texts twice; the second time something happens in the middle of them."""
    prompts = [f"def function_{index}(" for index in range(STREAMS)]
    first = await asyncio.gather(*(streamed(fleet, prompt, **more) for prompt in prompts))
    num_pieces = 0

    def count() -> None:
        nonlocal num_pieces
        num_pieces += 1
        if num_pieces == STREAMS * NUM_TOKENS // 10:
            disturb()

    second = await asyncio.gather(*(streamed(fleet, prompt, count, **more) for prompt in prompts))
    assert num_pieces > STREAMS * NUM_TOKENS // 10
    return [first, second]


async def until_idle(fleet: LocalFleet) -> None:
    async with asyncio.timeout(ANSWER_S):
        while (await scrape(fleet.endpoint("verifier").second_address))[RUNNING]:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.1)


async def test_clients_get_what_they_ask_for_or_hear_why_not() -> None:
    async with fleet_of(1) as fleet:
        sampled = {"temperature": 0.9, "seed": 5, "top_p": 0.9, "top_k": 50, "presence_penalty": 0.5, "min_tokens": 3}
        texts = [(await ask(fleet, **sampled)).json()["choices"][0]["text"] for _ in range(2)]
        assert texts[0] == texts[1]

        whole = (await ask(fleet, logprobs=2, max_tokens=4)).json()
        positions = whole["choices"][0]["logprobs"]
        assert positions["token_logprobs"] == [max(top.values()) for top in positions["top_logprobs"]]
        assert all(len(top) == 2 for top in positions["top_logprobs"])
        assert whole["metrics"]["speculative_decoding"]["exact"] is False

        biased = (await ask(fleet, logit_bias={"5": 100}, min_p=0.1, temperature=1.0, max_tokens=3)).json()
        (only,) = set(biased["choices"][0]["text"])
        unbiased = (await ask(fleet, logit_bias={"5": 100}, bad_words=[only], max_tokens=3)).json()
        assert only not in unbiased["choices"][0]["text"]

        stopped = (await ask(fleet, stop=["Read"])).json()["choices"][0]
        assert stopped["finish_reason"] == "stop"
        assert "Read" not in stopped["text"]

        refused = await ask(fleet, temperature=0.001)
        assert refused.status_code == httpx.codes.BAD_REQUEST
        assert refused.json()["error"]["message"].startswith("temperature: must be 0, or from 0.01 to 2")
        refused = await ask(fleet, speculation={"acceptance": "coupled"})
        assert refused.status_code == httpx.codes.BAD_REQUEST

        async with httpx.AsyncClient(trust_env=False) as client:
            (model,) = (await client.get(f"{fleet.gateway_url}/v1/models")).json()["data"]
        assert model["exact"] is False
        assert model["max_model_len"] == 512


async def test_a_client_that_leaves_frees_its_place() -> None:
    async with fleet_of(1) as fleet:
        body = completion(fleet, "def f(", max_tokens=450, ignore_eos=True, stream=True)
        async with (
            httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as client,
            client.stream("POST", f"{fleet.gateway_url}/v1/completions", json=body) as lines,
        ):
            async for line in lines.aiter_lines():
                if line:
                    break
            assert (await scrape(fleet.endpoint("verifier").second_address))[RUNNING] == 1
        await until_idle(fleet)


async def test_texts_go_on_elsewhere_when_a_verifier_is_stopped_or_killed_or_loses_its_engine() -> None:
    async with fleet_of(2) as fleet:

        def lose_engine() -> None:
            (core,) = [pid for pid in children_of(fleet.pid("verifier-0")) if "VLLM" in name_of(pid)]
            os.kill(core, signal.SIGKILL)

        troubles: list[Callable[[], None]] = [
            lambda: fleet.terminate("verifier-0"),
            lambda: fleet.kill("verifier-0"),
            lose_engine,
        ]
        for count, trouble in enumerate(troubles, 1):
            first, second = await undisturbed_and_with(fleet, trouble)
            assert [answer.num_tokens for answer in second] == [NUM_TOKENS] * STREAMS
            assert [answer.text for answer in second] == [answer.text for answer in first]
            assert not any(answer.speculation["lossy"] for answer in second)
            await fleet.until_restarted("verifier-0", count)


async def test_no_process_of_vllm_outlives_a_verifier_that_is_killed() -> None:
    async with fleet_of(1) as fleet:
        (core,) = [pid for pid in children_of(fleet.pid("verifier")) if "VLLM" in name_of(pid)]
        os.kill(fleet.pid("verifier"), signal.SIGKILL)
        async with asyncio.timeout(ANSWER_S):
            while "VLLM" in name_of(core):  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.1)


async def test_a_text_whose_penalties_begin_anew_on_another_verifier_says_so() -> None:
    async with fleet_of(2) as fleet:
        first, second = await undisturbed_and_with(fleet, lambda: fleet.kill("verifier-0"), presence_penalty=0.5)
        assert not any(answer.speculation["lossy"] for answer in first)
        assert any(answer.speculation["lossy"] for answer in second)
        assert [answer.num_tokens for answer in second] == [NUM_TOKENS] * STREAMS


def name_of(pid: int) -> str:
    """Name of a process that runs; empty: there is none."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return ""
    name, state = (line.partition(":")[2].strip() for line in status.splitlines()[:3:2])
    return "" if state.startswith("Z") else name
