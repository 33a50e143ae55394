"""vLLM's load client, at both doors; in an environment of vLLM's own, where there is one."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

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
def test_its_load_client_counts_what_it_asked_for(served, tmp_path, named) -> None:
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
