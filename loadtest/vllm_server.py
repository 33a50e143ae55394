"""`vllm serve` as its users run it, for benches: its three processes on cores of their own, asked over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from loadtest.client import decoded_together, run_batch
from loadtest.fleet import say
from loadtest.peers.inside.protocol import WARM_UP_TOKENS, Job
from loadtest.peers.run import VLLM, PeerFigure
from loadtest.streams import COUNTED, Ask
from paceline.cluster.spec import http_health
from paceline.cluster.supervisor import ChildSpec, ProcessSupervisor
from paceline.core.errors import UnavailableError
from tools.environments import child_environ
from tools.ports import free_port

SERVICES = Path(__file__).parents[1] / "services"
HOST, MODEL = "127.0.0.1", "target"
START_S, GRACE_S = 600.0, 20.0
# A context in such steps leaves room to draft past the end, and lets jobs share compiled code.
CONTEXT_STEP = 512


async def served_figures(python: Path, job: Job, temperatures: Sequence[float]) -> list[PeerFigure]:
    """Decode tokens/s of a server over all cases of a job, at each temperature.

    Raises:
        ConfigError, UnavailableError: It did not start.
        RuntimeError: A request failed.
    """
    async with vllm_server(python, job) as url:
        if job.drafters:
            await _rehearse(url, job)
        return [
            PeerFigure(
                peer=VLLM,
                mode=job.mode,
                streams=case.streams,
                draft_length=job.draft_length,
                temperature=temperature,
                decode_tokens_per_s=await _decode_tokens_per_s(url, job, case.streams, case.num_prompts, temperature),
            )
            for temperature in temperatures
            for case in job.cases
        ]


async def _rehearse(url: str, job: Job) -> None:
    """Shows the tier what drafting is worth at each load, as an operator does before going live.

    Raises:
        UnavailableError: It failed.
    """
    command = [sys.executable, "-m", "paceline", "rehearse", url, "--streams", str(job.most_streams)]
    rehearsal = await asyncio.create_subprocess_exec(*command, env={**os.environ, "PYTHONPATH": str(SERVICES)})
    try:
        async with asyncio.timeout(START_S):
            if await rehearsal.wait():
                raise UnavailableError("paceline rehearse failed; its last line says why")
    finally:
        if rehearsal.returncode is None:
            rehearsal.kill()
            await rehearsal.wait()


@asynccontextmanager
async def vllm_server(python: Path, job: Job) -> AsyncIterator[str]:
    """Serves a job's target with its drafts; yields the URL.

    Raises:
        ConfigError, UnavailableError: It did not start.
    """
    port, supervisor = free_port(HOST), ProcessSupervisor(say)
    url = f"http://{HOST}:{port}"
    with tempfile.TemporaryDirectory(prefix="paceline-") as logs:
        child = ChildSpec(
            name="vllm",
            argv=tuple(_command(python, job, port)),
            env=_environ(python, job),
            is_healthy=http_health(f"{url}/health"),
            log_path=Path(logs) / "vllm.log",
        )
        try:
            await supervisor.start([child], START_S)
            yield url
        finally:
            await supervisor.stop(GRACE_S)


def _command(python: Path, job: Job, port: int) -> list[str]:
    cores = ",".join(map(str, job.cores))
    # As `vllm serve` starts it, whose command line does not know its own version in the CPU build.
    server = ["taskset", "-c", cores, str(python), "-m", "vllm.entrypoints.openai.api_server"]
    context = (job.longest // CONTEXT_STEP + 1) * CONTEXT_STEP
    server += ["--model", job.target, "--served-model-name", MODEL, "--host", HOST, "--port", str(port)]
    server += ["--dtype", "bfloat16", "--max-model-len", str(context), "--max-num-seqs", str(job.most_streams)]
    server += ["--no-enable-prefix-caching"]
    if job.draft_length is None:
        return server
    speculation = {"method": "draft_model", "model": job.draft, "num_speculative_tokens": job.draft_length}
    if job.drafters:
        speculation |= {"method": "custom_class", "model": "paceline.vllm.Proposer"}
        tier = {
            "drafters": list(job.drafters),
            "cpus": ",".join(map(str, job.drafter_cores)),
            "learned_dir": job.learned_dir,
        }
        server += ["--additional-config", json.dumps({"paceline": tier})]
    return [*server, "--speculative-config", json.dumps(speculation)]


def _environ(python: Path, job: Job) -> dict[str, str]:
    return child_environ(os.environ) | {
        "PYTHONPATH": str(SERVICES),
        # vLLM itself recommends Intel's OpenMP, preloaded, for speed.
        "LD_PRELOAD": str(python.parents[1] / "lib" / "libiomp5.so"),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, job.cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }


async def _decode_tokens_per_s(url: str, job: Job, streams: int, num_prompts: int, temperature: float) -> float:
    """Over all waves of a case, as `WaveClock` has it, after one that warms up."""
    waves = [_asks(job.prompts[start : start + streams], job, temperature) for start in range(0, num_prompts, streams)]
    await run_batch(url, _asks(job.prompts[:streams], job, temperature, WARM_UP_TOKENS), streams, "warm-up")
    done = [
        (await run_batch(url, wave, streams, f"{job.mode}, {streams} streams")).completions
        for _ in range(job.passes)
        for wave in waves
    ]
    figures = [decoded_together(completions) for completions in done]
    return sum(tokens for tokens, _ in figures) / max(1e-9, sum(seconds for _, seconds in figures))


def _asks(prompts: Sequence[Sequence[int]], job: Job, temperature: float, max_tokens: int | None = None) -> list[Ask]:
    # No seed, since rows that have one are slow on a CPU.
    return [
        Ask(
            prompt=list(prompt),
            max_tokens=max_tokens or job.max_new_tokens,
            temperature=temperature,
            more={"model": MODEL, "seed": None, **COUNTED},
        )
        for prompt in prompts
    ]
