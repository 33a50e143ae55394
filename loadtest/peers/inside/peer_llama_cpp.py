"""llama.cpp: its own server on a loopback port, one slot per stream.

The server does not say when the last stream got its first token, so a wave's prefill is measured by itself, the same
prompts with one token each, and taken off. At one stream the server's own timings are exact.
"""

from __future__ import annotations

import functools
import http.client
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadtest.peers.inside import protocol
else:
    import protocol

SERVER = Path(sys.executable).with_name("llama-server")
VERSION_FILE = SERVER.with_name("llama-server.version")
CONTEXT_STEP = 256
START_S = 60.0
REQUEST_S = 600.0


class LlamaCpp:
    """A server process; it is stopped by `close`."""

    def __init__(self, job: protocol.Job) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self._prefill_s: dict[tuple[tuple[int, ...], ...], float] = {}
        command = _command(job, self._port)
        self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=protocol.die_with_parent)
        self._await_health()

    def about(self) -> protocol.About:
        """Version and precision."""
        version = VERSION_FILE.read_text(encoding="utf-8").strip()
        return protocol.About(version=version, precision="bf16 GGUF, KV cache f16 (its default)")

    def run(self, prompts: protocol.TokenIds, max_new_tokens: int) -> protocol.Wave:
        """All prompts as concurrent requests."""
        answers, seconds = self._ask(prompts, max_new_tokens)
        token_ids = [answer["tokens"] for answer in answers]
        if len(prompts) == 1:
            decode_s = answers[0]["timings"]["predicted_ms"] / 1000
        else:
            # Its server tells no single steps: a wave with drafts is timed with its stragglers.
            decode_s = seconds - self._time_of_prefill(prompts)
        num_tokens = sum(len(ids) for ids in token_ids)
        return protocol.Wave(
            token_ids=token_ids, seconds=seconds, decode_tokens=num_tokens - len(prompts), decode_s=decode_s
        )

    def close(self) -> None:
        """Stops the server."""
        self._server.terminate()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()

    def _time_of_prefill(self, prompts: protocol.TokenIds) -> float:
        key = tuple(tuple(prompt) for prompt in prompts)
        if key not in self._prefill_s:
            self._prefill_s[key] = min(self._ask(prompts, 1)[1] for _ in range(2))
        return self._prefill_s[key]

    def _ask(self, prompts: protocol.TokenIds, max_new_tokens: int) -> tuple[list[dict[str, Any]], float]:
        started_s = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(functools.partial(self._complete, max_new_tokens), prompts))
        return answers, time.perf_counter() - started_s

    def _complete(self, max_new_tokens: int, prompt: list[int]) -> dict[str, Any]:
        body = {
            "prompt": prompt,
            "n_predict": max_new_tokens,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        status, text = self._request("POST", "/completion", json.dumps(body))
        if status != http.client.OK:
            raise RuntimeError(f"llama-server answered {status}: {text[:200]}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _request(self, method: str, path: str, body: str | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def _await_health(self) -> None:
        deadline_s = time.monotonic() + START_S
        while self._server.poll() is None and time.monotonic() < deadline_s:
            try:
                if self._request("GET", "/health")[0] == http.client.OK:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        self.close()
        raise RuntimeError(f"llama-server did not get ready within {START_S:g} s")


def _command(job: protocol.Job, port: int) -> list[str]:
    """The server's command line; room for drafts past the end in every slot."""
    per_slot = (job.longest // CONTEXT_STEP + 1) * CONTEXT_STEP
    threads = str(len(job.cores))
    command = [str(SERVER), "--model", f"{job.target}/model.gguf", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--threads", threads, "--threads-batch", threads, "--offline", "--no-ui", "--cache-ram", "0"]
    command += ["--parallel", str(job.most_streams), "--ctx-size", str(per_slot * job.most_streams)]
    if job.draft_length is not None:
        command += ["--spec-type", "draft-simple", "--model-draft", f"{job.draft}/model.gguf"]
        command += ["--spec-draft-n-max", str(job.draft_length)]
    return command


if __name__ == "__main__":
    protocol.serve(LlamaCpp)
