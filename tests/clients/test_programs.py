"""Clients that are programs: vLLM's load client in an environment of its own, and Java's, each where it is there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

VLLM = os.environ.get("PACELINE_CLIENT_SUITE_VLLM", "")
# Both runs in one process: to start it takes longest. The CPU build has no command under the name that it looks for.
PROGRAM = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
common, runs = sys.argv[1:-2], (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions"))
for (backend, endpoint), result in zip(runs, sys.argv[-2:]):
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args([*common, "--backend", backend, "--endpoint", endpoint, "--result-filename", result]))
"""
NUM_PROMPTS, OUTPUT_LEN = 4, 8


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.skipif(not VLLM, reason="no environment with vLLM is there; make vllm-test sets one up")
def test_vllm_s_load_client_counts_what_it_asked_for(served, tmp_path, named) -> None:
    options = {
        "--base-url": served.url,
        # Without, it asks for the models and reads `root` of the first.
        **({"--model": served.model} if named else {}),
        "--tokenizer": str(served.folder),
        "--dataset-name": "random",
        "--random-input-len": "20",
        "--random-output-len": str(OUTPUT_LEN),
        "--num-prompts": str(NUM_PROMPTS),
        "--result-dir": str(tmp_path),
    }
    flags = [word for option in options.items() for word in option]
    flags += ["--disable-tqdm", "--ignore-eos", "--save-result", "--save-detailed"]
    command = [VLLM, "-c", PROGRAM, *flags, "text.json", "chat.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("text", "chat"):
        told = json.loads((tmp_path / f"{name}.json").read_text())
        assert (told["completed"], told["failed"]) == (NUM_PROMPTS, 0), told["errors"]
        assert told["total_output_tokens"] == NUM_PROMPTS * OUTPUT_LEN
        assert all(told["generated_texts"])


@pytest.mark.skipif(not shutil.which("javac"), reason="needs java and javac, Debian's package default-jdk-headless")
def test_java_s_own_client_gets_the_text_of_a_seed_whole_and_streamed(served) -> None:
    """Each of its requests offers HTTP/2 by `Upgrade: h2c`, which a gateway ignores."""
    messages = [{"role": "user", "content": "Tell me a story."}]
    asked: Any = {"model": served.model, "messages": messages, "max_tokens": 30, "seed": 3}
    official = OpenAI(base_url=served.v1, api_key="none", max_retries=0, timeout=120)
    wanted = official.chat.completions.create(**asked).choices[0].message.content
    bodies = [json.dumps({**asked, "stream": stream}) for stream in (False, True)]
    command = ["java", Path(__file__).with_name("Post.java"), f"{served.v1}/chat/completions", *bodies]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    offered, whole, again, *events = filter(None, done.stdout.splitlines())
    assert offered == again == "HTTP_2 HTTP_1_1 200"
    assert json.loads(whole)["choices"][0]["message"]["content"] == wanted
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert "".join(choice["delta"].get("content") or "" for each in chunks for choice in each["choices"]) == wanted
    assert events[-1] == "data: [DONE]"
