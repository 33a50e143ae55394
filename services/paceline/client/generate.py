"""`paceline generate`: streams a completion from a gateway over HTTP, then prints its speed and what speculation did.

It knows the HTTP API and nothing of the services.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from paceline.client.server import ServerConfig, chosen_model, connection, error_message, reached
from paceline.core.errors import ConfigError, PacelineError, UnavailableError
from paceline.service.config import as_called, parse, setting

PROG = "paceline generate"
DESCRIPTION = (
    "Streams a completion of PROMPT from a gateway and prints its speed and what speculation did. PROMPT may stand "
    "first on the command line without a flag; - reads it from standard input. --compare sends it twice, with and "
    "without speculation, and prints how many times as fast it was."
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
    compare: bool = setting(
        False, help="Send the prompt with speculation and then without, and print the ratio of their speeds."
    )
    method: str = setting("", help="Ways to draft, such as ngram or draft_model+ngram; empty: all that are served.")
    max_draft_tokens: int | None = setting(None, help="Most draft tokens verified in one step.", low=0, high=64)
    timeout_s: float = setting(120.0, help="Longest wait for the next piece.", unit="seconds", low=0.1)

    def __post_init__(self) -> None:
        if self.compare and not self.speculation:
            raise ConfigError("--compare sends the prompt with speculation and without: leave --no-speculation out")


def main(argv: Sequence[str]) -> None:
    config = parse(GenerateConfig, argv, os.environ, PROG, DESCRIPTION, first="prompt")
    try:
        generate(config)
    except PacelineError as error:
        sys.stderr.write(f"{as_called(PROG)}: error: {error}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedText:
    """A text that has come, and how.

    Attributes:
        first_s: Seconds to its first piece.
        decode_s: Seconds from there to its last piece.
        metrics: What the answer says of speculation; None: nothing.
    """

    text: str
    num_tokens: int
    first_s: float
    decode_s: float
    metrics: Any

    @property
    def rate(self) -> float:
        """Tokens a second after the first one; 0: the text came in one piece."""
        return (self.num_tokens - 1) / self.decode_s if self.decode_s > 0.0 else 0.0


def generate(config: GenerateConfig) -> None:
    """Prints the text as it comes, then one line on its speed and on speculation to stderr.

    With `compare` the same text is generated without speculation afterwards, and the ratio of both speeds follows.

    Raises:
        UnavailableError: The gateway cannot be reached or stops answering.
        PacelineError: It refuses the request, ends it with an error, or the two texts differ.
    """
    if config.compare and config.prompt == "-":
        # Standard input can be read once.
        config = replace(config, prompt=sys.stdin.read())
    first = complete(config, echo=True)
    sys.stderr.write(f"{summary(first)}\n")
    if config.compare:
        plain = complete(replace(config, speculation=False, compare=False), echo=False)
        sys.stderr.write(f"without speculation: {summary(plain)}\n{comparison(first, plain)}\n")


def complete(config: GenerateConfig, *, echo: bool) -> TimedText:
    """Returns a completion, and prints it as it comes if that is wanted; raises as `generate`."""
    began_s, pieces = time.monotonic(), list[str]()
    first_s = last_s = 0.0
    metrics: Any = None
    usage: Any = None
    for chunk in stream(config):
        for choice in chunk.get("choices", ()):
            if piece := choice.get("text") or (choice.get("delta") or {}).get("content") or "":
                last_s = time.monotonic() - began_s
                first_s = first_s or last_s
                pieces.append(piece)
                _print(piece if echo else "")
        metrics = chunk.get("metrics") or metrics
        usage = chunk.get("usage") or usage
    _print("\n" if echo else "")
    num_tokens = (usage or {}).get("completion_tokens", 0)
    return TimedText(
        text="".join(pieces), num_tokens=num_tokens, first_s=first_s, decode_s=last_s - first_s, metrics=metrics
    )


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


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


def comparison(speculative: TimedText, plain: TimedText) -> str:
    """Returns one line on how much faster the first of two completions came; their texts are the same.

    Raises:
        PacelineError: They are not.
    """
    if speculative.text != plain.text:
        raise PacelineError(
            "the two texts differ: give a --seed, or see docs/speculation.md for the rules and devices where only the "
            "distribution is the same"
        )
    if not speculative.rate or not plain.rate:
        return "[identical texts; too short to compare]"
    rates = f"{speculative.rate:.0f} and {plain.rate:.0f} tokens/s"
    if (speculative.metrics or {}).get("speculative_decoding", {}).get("num_spec_steps") == 0:
        return f"[identical texts, both decoded plainly, since no draft token was verified: {rates}]"
    return f"[identical texts; speculation was {speculative.rate / plain.rate:.2f} times as fast: {rates}]"


def summary(done: TimedText) -> str:
    """Returns one line on the tokens, their speed, and what speculation did."""
    record = (done.metrics or {}).get("speculative_decoding")
    speed = f"first after {done.first_s:.2f} s" + (f", then {done.rate:.0f} tokens/s" if done.rate else "")
    if not record or not record.get("num_spec_steps"):
        return f"[{done.num_tokens} tokens, {speed}; no draft token verified]"
    return (
        f"[{done.num_tokens} tokens in {record['num_steps']} steps, {speed}; "
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
