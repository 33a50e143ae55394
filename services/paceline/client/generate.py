"""`paceline generate`: streams one completion from a gateway over HTTP, then prints what speculation did.

It knows the HTTP API and nothing of the services.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from paceline.client.server import ServerConfig, chosen_model, connection, error_message, reached
from paceline.core.errors import PacelineError, UnavailableError
from paceline.service.config import as_called, parse, setting

PROG = "paceline generate"
DESCRIPTION = (
    "Streams a completion of PROMPT from a gateway and prints what speculation did. PROMPT may stand first "
    "on the command line without a flag; - reads it from standard input."
)
CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig(ServerConfig):
    prompt: str = setting(help="Text to continue.")
    chat: bool = setting(False, help="Send the prompt as a user's message of a chat.")
    max_tokens: int = setting(128, help="Most tokens to generate.", low=1)
    temperature: float = setting(0.0, help="0 is greedy.", low=0.0, high=100.0)
    top_p: float = setting(1.0, help="Nucleus mass.", low=0.0, high=1.0)
    seed: int | None = setting(None, help="The same seed gives the same text.", low=0)
    speculation: bool = setting(True, help="Use draft tokens; they never change the text.")
    method: str = setting("", help="Ways to draft, such as ngram or draft_model+ngram; empty: all that are served.")
    max_draft_tokens: int | None = setting(None, help="Most draft tokens verified in one step.", low=0, high=64)
    timeout_s: float = setting(120.0, help="Longest wait for the next piece.", unit="seconds", low=0.1)


def main(argv: Sequence[str]) -> None:
    config = parse(GenerateConfig, argv, os.environ, PROG, DESCRIPTION, first="prompt")
    try:
        generate(config)
    except PacelineError as error:
        sys.stderr.write(f"{as_called(PROG)}: error: {error}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def generate(config: GenerateConfig) -> None:
    """Prints the text as it comes, then one line on speculation to stderr.

    Raises:
        UnavailableError: The gateway cannot be reached or stops answering.
        PacelineError: It refuses the request, or ends it with an error.
    """
    metrics: Any = None
    usage: Any = None
    for chunk in stream(config):
        for choice in chunk.get("choices", ()):
            sys.stdout.write(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
            sys.stdout.flush()
        metrics = chunk.get("metrics") or metrics
        usage = chunk.get("usage") or usage
    sys.stdout.write("\n")
    sys.stdout.flush()
    sys.stderr.write(f"{summary(metrics, usage)}\n")


def stream(config: GenerateConfig) -> Iterator[dict[str, Any]]:
    """Yields the chunks of the stream; raises as `generate`."""
    timeout = httpx.Timeout(config.timeout_s, connect=CONNECT_TIMEOUT_S)
    with reached(config.url), httpx.Client(**connection(config), timeout=timeout) as client:
        path = "/v1/chat/completions" if config.chat else "/v1/completions"
        body = request_body(config, config.model or chosen_model(client))
        with client.stream("POST", path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                raise PacelineError(error_message(response.read().decode(errors="replace")))
            yield from _events(response.iter_lines())


def request_body(config: GenerateConfig, model: str) -> dict[str, Any]:
    prompt = sys.stdin.read() if config.prompt == "-" else config.prompt
    speculation: dict[str, Any] = {"enabled": config.speculation}
    if config.max_draft_tokens is not None:
        speculation["max_draft_tokens"] = config.max_draft_tokens
    if config.method:
        speculation["method"] = config.method
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": config.max_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": speculation,
    }
    if config.chat:
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if config.seed is not None:
        body["seed"] = config.seed
    return body


def summary(metrics: Any, usage: Any) -> str:
    """Returns one line on the tokens and on what speculation did."""
    num_tokens = (usage or {}).get("completion_tokens", 0)
    record = (metrics or {}).get("speculative_decoding")
    if not record or not record.get("num_spec_steps"):
        return f"[{num_tokens} tokens, no draft token verified]"
    return (
        f"[{num_tokens} tokens in {record['num_steps']} steps, "
        f"acceptance rate {record['draft_acceptance_rate']:.2f} "
        f"({record['num_accepted_draft_tokens']} of {record['num_draft_tokens']} draft tokens), "
        f"mean acceptance length {record['mean_acceptance_length']:.2f}, "
        f"mean batch size {record['mean_batch_size']:.1f}]"
    )


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise PacelineError(str(chunk["error"].get("message", chunk["error"])))
        yield chunk
    raise UnavailableError("the stream broke off before its end")
