"""Processes of these tests: `vllm serve`, and a drafter that comes and goes at one address."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from paceline.cluster.checkpoints import DEMO_DRAFTER
from paceline.cluster.supervisor import child_environment
from paceline.store.registry import answers_health
from tools.environments import child_environ
from tools.ports import free_port
from tools.procfs import children_of

HOST = "127.0.0.1"
CPUS = sorted(os.sched_getaffinity(0))
# vLLM's, and those of all else; the same one where there is only one.
VLLM_CPUS, TIER_CPUS = CPUS[:1], CPUS[-1:]
START_S, STOP_S, POLL_S = 240.0, 20.0, 0.1
PROPOSER, STEADY_PROPOSER = "paceline.vllm.Proposer", "tests.vllm.steady.Proposer"
MAX_MODEL_LEN, MAX_NUM_SEQS, MAX_CHAIN = 512, 32, 7
HELPER = "helper"


class NotStartedError(Exception):
    """A process ended, or was not well in time."""


class Process:
    """A process with a log, which ends with us.

    Args:
        argv: Program and arguments.
        env: The whole environment.
        cpus: It and its children keep to these.
        log: What it writes is added there.
    """

    def __init__(self, argv: list[str], env: dict[str, str], cpus: list[int], log: Path) -> None:
        command = [sys.executable, "-m", "paceline.cluster", str(os.getpid()), *argv]
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        os.sched_setaffinity(self._process.pid, cpus)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def until(self, is_well: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_S
        while not is_well():
            if not self.lives or time.monotonic() > deadline_s:
                last = self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
                raise NotStartedError(f"status {self._process.poll()}: {last}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Ends it and what it started, by force in the end."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.lives:
                self.signal(number)
                self.signal(signal.SIGCONT)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                continue
            break
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _answered(check: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
    """What a check says; the caller may be in an event loop of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, check()).result()


class Drafter:
    """Drafts at one address, in as many lives as a test wants; dead at first.

    Args:
        folder: Of its log.
        model: Checkpoint folder.
    """

    def __init__(self, folder: Path, model: Path = DEMO_DRAFTER) -> None:
        self._model = model
        self._log = folder / "drafter.log"
        self.port = free_port(HOST)
        self._process: Process | None = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def start(self) -> None:
        argv = [sys.executable, "-m", "paceline.drafter", "--model", str(self._model), "--dtype", "float32"]
        argv += ["--host", HOST, "--port", str(self.port), "--metrics-port", "0", "--redis-url", "memory://"]
        argv += ["--threads", "1"]
        env = child_environment(os.environ, num_threads=1)
        self._process = Process(argv, env, TIER_CPUS, self._log)
        check = partial(answers_health, self.address, "drafter")
        self._process.until(lambda: _answered(check))

    def kill(self) -> None:
        assert self._process is not None, "it runs"
        self._process.signal(signal.SIGKILL)
        self._process.stop()

    def freeze(self) -> None:
        assert self._process is not None, "it runs"
        self._process.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None, "it runs"
        self._process.signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


class Vllm:
    """`vllm serve` in float32 on its core; plain without a drafter's address.

    Args:
        target: Checkpoint folder.
        folder: Of its log.
        drafter: Address of a drafter.
        proposer: The class that vLLM asks for guesses.
        more: Further arguments of vLLM.

    Attributes:
        helper_url: Where its helper shows metrics.
    """

    def __init__(
        self,
        target: Path,
        folder: Path,
        drafter: str | None = None,
        proposer: str = PROPOSER,
        more: Sequence[str] = (),
    ) -> None:
        self.port, metrics_port = free_port(HOST), free_port(HOST)
        self.helper_url = f"http://{HOST}:{metrics_port}"
        # As `vllm serve` starts it, whose command line does not know its own version in the CPU build.
        argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
        argv += ["--host", HOST, "--port", str(self.port), "--served-model-name", "target", "--dtype", "float32"]
        argv += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS), "--block-size", "32"]
        argv += ["--enforce-eager", *more]
        if drafter is not None:
            speculation = {"method": "custom_class", "model": proposer, "num_speculative_tokens": MAX_CHAIN}
            tier = {"drafters": [drafter], "cpus": ",".join(map(str, TIER_CPUS)), "learned_dir": "none"}
            tier["metrics_address"] = f"{HOST}:{metrics_port}"
            argv += ["--speculative-config", json.dumps(speculation)]
            argv += ["--additional-config", json.dumps({"paceline": tier})]
        self._process = Process(argv, _vllm_environ(), VLLM_CPUS, folder / f"vllm-{self.port}.log")
        self.url = f"http://{HOST}:{self.port}"
        try:
            self._process.until(self._is_well)
        except BaseException:
            self._process.stop()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.lives and self._is_well()

    def helpers(self) -> list[int]:
        """Process ids of the helpers of its engine."""
        return [pid for pid in _descendants(self._process.pid) if _is_helper(pid)]

    def stop(self) -> None:
        self._process.stop()

    def _is_well(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False


@contextmanager
def vllm(
    target: Path, folder: Path, drafter: str | None = None, proposer: str = PROPOSER, more: Sequence[str] = ()
) -> Iterator[Vllm]:
    """A `vllm serve` that stops at the end."""
    server = Vllm(target, folder, drafter, proposer, more)
    try:
        yield server
    finally:
        server.stop()


def _vllm_environ() -> dict[str, str]:
    path = os.environ["PYTHONPATH"]
    return child_environ(os.environ) | {
        "PYTHONPATH": path,
        "LD_PRELOAD": str(Path(sys.prefix) / "lib" / "libiomp5.so"),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, VLLM_CPUS)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for child in children_of(pid):
        found += [child, *_descendants(child)]
    return found


def _is_helper(pid: int) -> bool:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return False
    return any(each.endswith(HELPER) for each in arguments[1:4])
