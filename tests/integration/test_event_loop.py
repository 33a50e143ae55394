"""However much a request holds or asks for, no door keeps the event loop for long: all streams are served by it."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from paceline.core.messages import GenerateRequest
from paceline.core.params import SamplingParams, SpeculationParams
from tests.integration.conftest import served_verifier
from tests.support.log_stream import verifier_calls
from tests.support.scripted_fleet import MODEL, SHARES_A_GATEWAY, Script, ScriptedFleet
from tests.unit.simulated.test_engine import served

pytestmark = SHARES_A_GATEWAY

CONTEXT_LEN = 32_768
GATEWAY = {"context_len": CONTEXT_LEN}
# The aim is 50 ms of the loop's own CPU time; the verifier is in the loop, too. Measured in the time of an empty loop
# of a million turns, 27 ms on an older core, since neighbours and slow machines stretch both.
MAX_STALL = 6.0
MAX_BODY_BYTES = 4 * 1024 * 1024
TEXT, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "x"}


def tools(*, named: Any = None) -> list[Any]:
    """As many functions as are allowed, with schemas that fill half of a body."""
    schema = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(40)}}
    each = [{"name": f"f{at}", "parameters": schema, "input_schema": schema} for at in range(1024)]
    if named is None:
        return each
    return [{"type": "function", **({"function": one} if named == CHAT else one)} for one in each]


def namespaces(kind: str, num_tools: int) -> list[Any]:
    inner = [{"type": "function", "name": "g"}, *({"type": kind, "name": f"f{at}"} for at in range(num_tools - 1))]
    return [{"type": "namespace", "name": "n", "tools": inner}]


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
THOUGHT = {"type": "thinking", "thinking": "x" * 60}
# The largest body of its kind that each endpoint takes or refuses, and the status of the answer.
LARGEST = {
    "a prompt judged": (TEXT, {"prompt": [5] * 23_000, "echo": True, "logprobs": 20, "max_tokens": 0}, 200),
    "a prompt judged by itself": (TEXT, {"prompt": [5] * 23_000, "prompt_logprobs": 20, "max_tokens": 1}, 200),
    "a prompt judged in a stream": (
        TEXT,
        {"prompt": [5] * 23_000, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": True},
        200,
    ),
    "choices judged": (TEXT, {"prompt": "x", "n": 128, "logprobs": 20, "max_tokens": 185}, 200),
    "choices of a chat judged": (
        CHAT,
        {"messages": [USER], "n": 128, "logprobs": True, "top_logprobs": 20, "max_tokens": 185},
        200,
    ),
    "too many log probabilities": (TEXT, {"prompt": "x", "n": 128, "logprobs": 20, "max_tokens": 1000}, 400),
    "tokens of prompts, repeated": (TEXT, {"prompt": [5] * 30_000, "n": 128, "return_token_ids": True}, 200),
    "origins of tokens": (
        TEXT,
        {"prompt": "x", "n": 128, "max_tokens": 300, "speculation": {"token_origins": True}},
        200,
    ),
    "a text beyond the context": (TEXT, {"prompt": "x" * (MAX_BODY_BYTES - 100)}, 400),
    "a chat of many messages": (CHAT, {"messages": [USER] * 30_000, "max_tokens": 1}, 400),
    "tools of a chat": (CHAT, {"messages": [USER], "tools": tools(named=CHAT), "max_tokens": 1}, 400),
    "tools of a response": (RESPONSES, {"input": "x", "tools": tools(named=RESPONSES), "max_output_tokens": 1}, 400),
    "a namespace": (RESPONSES, {"input": "x", "tools": namespaces("function", 1024), "max_output_tokens": 1}, 200),
    "a namespace of what is no function": (RESPONSES, {"input": "x", "tools": namespaces("x", 33_000)}, 400),
    "calls in a row": (RESPONSES, {"input": [CALL] * 24_000, "max_output_tokens": 1}, 400),
    "thoughts in a row": (MESSAGES, {"messages": [{"role": "assistant", "content": [THOUGHT] * 30_000}, USER]}, 400),
    "tools of a message": (MESSAGES, {"messages": [USER], "tools": tools(), "max_tokens": 1}, 400),
    "tools that are counted": ("/v1/messages/count_tokens", {"messages": [USER], "tools": tools()}, 400),
    "a text that is tokenized": ("/tokenize", {"prompt": "x" * 30_000, "return_token_strs": True}, 200),
    "tokens that become text": ("/detokenize", {"tokens": [5] * CONTEXT_LEN}, 200),
}
LIKE_OTHERS = ("a prompt judged ", "choices of a chat", "a namespace of", "tools of a response", "tools that are")


@asynccontextmanager
async def watched() -> AsyncIterator[list[float]]:
    """Collects the CPU time of each turn of the event loop while a block runs, in seconds."""
    # What the tests have loaded is no service's.
    gc.collect()
    gc.freeze()
    loop, turns_s, began_s = asyncio.get_running_loop(), [0.0], time.thread_time()
    timer: asyncio.Handle

    def look() -> None:
        nonlocal timer, began_s
        now_s = time.thread_time()
        turns_s.append(now_s - began_s)
        began_s, timer = now_s, loop.call_later(0.001, look)

    timer = loop.call_soon(look)
    try:
        yield turns_s
    finally:
        timer.cancel()
        gc.unfreeze()


def yardstick_s() -> float:
    """Returns the CPU time of a million turns of an empty loop, here and now, in seconds."""
    began_s = time.thread_time()
    for _ in range(1_000_000):
        continue
    return time.thread_time() - began_s


async def status_of(fleet: ScriptedFleet, path: str, raw: bytes) -> int:
    """Sends a body and throws the answer away as it comes: a client's work must not count."""
    host, _, port = fleet.addresses.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(raw)}\r\n\r\n"
    writer.write(head.encode())
    for at in range(0, len(raw), 65536):
        writer.write(raw[at : at + 65536])
        await writer.drain()
    status = int((await reader.readline()).split()[1])
    while await reader.read(65536):
        continue
    writer.close()
    return status


@pytest.mark.parametrize(
    "kind",
    # One after the other they take a minute; what is judged goes the same ways in text and in chats.
    [pytest.param(kind, marks=[pytest.mark.full] * kind.startswith(LIKE_OTHERS)) for kind in LARGEST],
)
async def test_the_largest_bodies_and_answers_let_other_streams_run(fleet: ScriptedFleet, kind: str) -> None:
    """The third audit: names within a namespace took 40 s, and 400,000 log probabilities 5 s, of everybody's."""
    path, body, status = LARGEST[kind]
    fleet.verifier.script = Script(step_len=64)
    raw = json.dumps({"model": MODEL, **body}).encode()
    assert len(raw) <= MAX_BODY_BYTES
    async with watched() as turns_s:
        assert await status_of(fleet, path, raw) == status
    assert max(turns_s) < MAX_STALL * yardstick_s()


# Tokens of a prompt near the longest, and the samples of one request.
LONG, SAMPLES = 100_000, 16
# What makes a sample dear beside its prompt.
DEAR = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "a grammar": {"grammar": LLMatcher.grammar_from_regex("(alpha beta ){1,2000}")},
}


def sample(number: int, prompt: tuple[int, ...], fields: dict[str, Any]) -> GenerateRequest:
    return GenerateRequest(
        session_id=f"s{number}",
        epoch=1,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=4, ignore_eos=True, seed=number, **fields),
        speculation=SpeculationParams(),
    )


@pytest.mark.parametrize("kind", DEAR)
async def test_samples_of_the_longest_prompts_let_other_sessions_of_a_verifier_run(tmp_path: Path, kind: str) -> None:
    """Audit 4, b04: 78 ms for each sample of a long prompt with a penalty, in a row, of everybody's."""
    prompt = tuple(5 + place * place % 3001 for place in range(LONG))
    engine = served(tmp_path, kv_tokens=2 * LONG)
    async with (
        served_verifier(engine, max_queue=2 * SAMPLES) as (address, host),
        verifier_calls(address, host.identity.vocab_size) as calls,
    ):
        # From now on its pages are found by all of them.
        await calls.tokens(sample(0, prompt, {}))
        async with watched() as turns_s:
            async with asyncio.TaskGroup() as samples:
                for at in range(SAMPLES):
                    samples.create_task(calls.tokens(sample(1 + at, prompt, DEAR[kind])))
                    # As gateways do.
                    await asyncio.sleep(0)
    assert max(turns_s) < MAX_STALL * yardstick_s()
