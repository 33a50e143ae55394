"""`paceline generate` against a real HTTP server that plays a gateway."""

from __future__ import annotations

import http.server
import io
import json
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from paceline.client import generate as client
from paceline.core.errors import PacelineError

RECORD = {
    "num_steps": 3,
    "num_spec_steps": 2,
    "draft_acceptance_rate": 0.75,
    "num_accepted_draft_tokens": 6,
    "num_draft_tokens": 8,
    "mean_acceptance_length": 4.0,
    "mean_batch_size": 1.5,
}
TEXT = [{"choices": [{"text": "Hello,"}]}, {"choices": [{"text": " wörld"}]}]
END = [
    {"choices": [{"text": "", "finish_reason": "length"}]},
    {"choices": [], "usage": {"completion_tokens": 9}, "metrics": {"speculative_decoding": RECORD}},
]


@dataclass
class Script:
    """What the server answers, and what it was asked."""

    chunks: list[Any]
    status: int = 200
    models: list[str] = field(default_factory=lambda: ["demo"])
    done: bool = True
    bodies: list[Any] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def script() -> Iterator[Script]:
    played = Script(chunks=[*TEXT, *END])

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            """Says nothing."""

        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": name} for name in played.models]})
            self.answer(200, body.encode())

        def do_POST(self) -> None:
            played.paths.append(self.path)
            played.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in played.chunks]
            lines += ["data: [DONE]\n\n"] if played.done else []
            text = json.dumps(played.chunks[0]) if played.status != 200 else "".join(lines)
            self.answer(played.status, text.encode())

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        played.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield played
        server.shutdown()
        thread.join()


def test_text_goes_to_stdout_and_the_record_to_stderr(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    client.main(["Say hello", "--url", script.url, "--seed", "7", "--no-speculation"])
    printed = capsys.readouterr()
    assert printed.out == "Hello, wörld\n"
    assert re.fullmatch(
        r"\[9 tokens in 3 steps, first after \d+\.\d\d s, then \d+ tokens/s; acceptance rate 0\.75 "
        r"\(6 of 8 draft tokens\), mean acceptance length 4\.00, mean batch size 1\.5\]\n",
        printed.err,
    )
    assert script.paths == ["/v1/completions"]
    (body,) = script.bodies
    assert (body["model"], body["prompt"], body["seed"]) == ("demo", "Say hello", 7)
    assert body["speculation"] == {"enabled": False}


def test_a_chat_sends_messages_and_reads_deltas(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.chunks = [
        {"choices": [{"delta": {"role": "assistant"}}]},
        {"choices": [{"delta": {"content": "Hi"}}]},
    ]
    client.main(["Hello", "--chat", "--url", script.url, "--max-draft-tokens", "4"])
    assert capsys.readouterr().out == "Hi\n"
    assert script.paths == ["/v1/chat/completions"]
    assert script.bodies[0]["messages"] == [{"role": "user", "content": "Hello"}]
    assert script.bodies[0]["speculation"] == {"enabled": True, "max_draft_tokens": 4}


def test_a_dash_reads_the_prompt_from_stdin(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    client.main(["-", "--url", script.url, "--model", "demo"])
    assert script.bodies[0]["prompt"] == "from stdin"


def failure(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        client.main(argv)
    assert caught.value.code == 1
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": 400, "chunks": [{"error": {"message": "max_tokens: too large"}}]}, "error: max_tokens: too large"),
        ({"chunks": [*TEXT, {"error": {"message": "the verifier is gone"}}]}, "the verifier is gone"),
        ({"done": False}, "broke off"),
        ({"models": ["a", "b"]}, "choose with --model: a, b"),
        ({"url": "http://127.0.0.1:1"}, "http://127.0.0.1:1 cannot be reached"),
    ],
)
def test_a_failure_is_one_line(
    script: Script, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    for name, value in changes.items():
        setattr(script, name, value)
    said = failure(["x", "--url", script.url], capsys)
    assert said.startswith("paceline generate: error: ")
    assert message in said.splitlines()[-1]


def test_without_draft_tokens_the_line_says_so() -> None:
    done = client.TimedText(text="abc", num_tokens=3, first_s=0.25, decode_s=0.5, metrics=None)
    assert client.summary(done) == "[3 tokens, first after 0.25 s, then 4 tokens/s; no draft token verified]"


def test_comparing_sends_both_and_prints_the_ratio(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    client.main(["Say hello", "--url", script.url, "--compare"])
    printed = capsys.readouterr()
    assert printed.out == "Hello, wörld\n"
    assert [body["speculation"] for body in script.bodies] == [{"enabled": True}, {"enabled": False}]
    first, plain, ratio = printed.err.splitlines()
    assert first.startswith("[9 tokens")
    assert plain.startswith("without speculation: [9 tokens")
    assert re.fullmatch(r"\[identical texts; speculation was \d+\.\d\d times as fast: \d+ and \d+ tokens/s\]", ratio)


def test_comparing_without_speculation_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        client.main(["x", "--compare", "--no-speculation"])
    assert "leave --no-speculation out" in capsys.readouterr().err


def test_compared_texts_must_be_the_same() -> None:
    one, other = (
        client.TimedText(text=text, num_tokens=9, first_s=0.1, decode_s=seconds, metrics=None)
        for text, seconds in (("abc", 1.0), ("abd", 2.0))
    )
    assert "speculation was 2.00 times as fast: 8 and 4" in client.comparison(one, replace(other, text="abc"))
    with pytest.raises(PacelineError, match="the two texts differ"):
        client.comparison(one, other)


def test_without_draft_tokens_there_is_no_ratio() -> None:
    record = {"speculative_decoding": {"num_spec_steps": 0}}
    one, other = (
        client.TimedText(text="abc", num_tokens=9, first_s=0.1, decode_s=seconds, metrics=record)
        for seconds in (1.0, 2.0)
    )
    assert client.comparison(one, other).endswith("since no draft token was verified: 8 and 4 tokens/s]")


def test_something_that_is_no_gateway_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Metrics) as server,
        pytest.raises(SystemExit) as caught,
    ):
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        client.main(["x", "--url", f"http://127.0.0.1:{server.server_port}"])
    thread.join()
    assert caught.value.code == 1
    assert "does not speak OpenAI's HTTP API" in capsys.readouterr().err


class _Metrics(http.server.BaseHTTPRequestHandler):
    """Answers anything as a metrics page does."""

    def log_message(self, *args: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"# HELP vllm:num_requests_running\n")
