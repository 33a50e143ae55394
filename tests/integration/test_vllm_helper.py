"""A proposer, its real helper process and a real drafter, beside a batch that behaves as vLLM's."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from paceline.client.rehearse import listening
from paceline.core.draft_policy import REHEARSED
from paceline.verifier.vllm.helper_line import HelperLine
from paceline.vllm import tier_client
from paceline.vllm.places import helper_socket, mode_socket
from paceline.vllm.proposer import Proposer
from tests.integration.conftest import running_drafter
from tests.support.fuzzing import until
from tests.support.vllm_batch import VllmBatch, vllm_config
from tools.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
VOCAB, MAX_LEN = 512, 4096
PATIENCE_S = 60.0
# As long as a step of a small target.
STEP_S = 0.02


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "services"), str(ROOT)]))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0+cpu"))


class Engine:
    """A batch that accepts every guess, so that drafting pays, and a proposer that is asked after each step."""

    def __init__(self, model: Path, address: str) -> None:
        self.batch = VllmBatch(max_model_len=MAX_LEN)
        config = vllm_config(str(model), vocab_size=VOCAB, max_model_len=MAX_LEN)
        config.additional_config["paceline"] = {
            "drafters": [address],
            "learned_dir": "none",
            "metrics_address": (metrics := f"127.0.0.1:{free_port('127.0.0.1')}"),
        }
        self._metrics_url = f"http://{metrics}/metrics"
        self.instance_id = config.instance_id
        self.proposer = Proposer(config)
        self.proposer.load_model("target")
        self._guesses: dict[str, list[int]] = {}

    def metrics(self) -> str:
        return httpx.get(self._metrics_url, trust_env=False).text

    def until(self, done: Callable[[list[list[int]]], object]) -> list[list[int]]:
        end_s = time.monotonic() + PATIENCE_S
        # Texts must not outgrow the drafter's context, of 512 tokens, before there is a helper.
        while not mode_socket(self.instance_id, 0).exists():
            time.sleep(STEP_S)
            assert time.monotonic() < end_s
        while True:
            time.sleep(STEP_S)
            sampled = self.batch.step(lambda name: [*self._guesses.get(name, []), len(self.batch.texts[name]) % 7])
            self.batch.show(self.proposer, self._guesses)
            guesses = self.proposer.propose(sampled, self.batch.lengths, self.batch.token_ids)
            self._guesses = dict(zip(self.batch.rows, guesses, strict=True))
            if done(guesses):
                return guesses
            assert time.monotonic() < end_s


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    started: list[Engine] = []
    yield started
    for engine in started:
        engine.proposer.client.close()


async def test_a_drafter_of_the_tier_drafts_for_rows_of_vllm(tiny_pair, engines, monkeypatch) -> None:
    # No guess of an untrained drafter is worth its row.
    monkeypatch.setattr(tier_client, "HELPER_MODULE", "tests.vllm.steady_helper")
    target, draft = tiny_pair
    async with running_drafter(draft) as (address, host):
        engine = Engine(target, address)
        engines.append(engine)
        engine.batch.admit("a", [1, 2, 3])
        engine.batch.admit("b", [4, 5])
        # Each has had some, not necessarily in one step.
        drafted: dict[int, list[int]] = {}

        def both(guesses: list[list[int]]) -> bool:
            drafted.update({row: chain for row, chain in enumerate(guesses) if chain})
            return len(drafted) == 2

        await asyncio.to_thread(engine.until, both)
        assert all(0 <= token < VOCAB for chain in drafted.values() for token in chain)
        assert host.num_sessions == 2
        engine.batch.end("a")
        await asyncio.to_thread(engine.until, lambda _: host.num_sessions == 1)
        shown = await asyncio.to_thread(engine.metrics)
        assert "paceline:gamma_bucket" in shown
        assert 'paceline:draft_nodes_total{fate="accepted",source="draft_model"}' in shown
        engine.proposer.client.close()
        # Its sessions end with its stream.
        await until(lambda: not host.num_sessions)


async def test_a_rehearsal_decides_whether_vllm_waits_for_drafts(tiny_pair, engines) -> None:
    target, draft = tiny_pair
    async with running_drafter(draft) as (address, _):
        engine = Engine(target, address)
        engines.append(engine)
        engine.batch.admit("a", [1, 2, 3])
        helper_process = engine.proposer.client._helper
        await until(mode_socket(engine.instance_id, 0).exists)
        # A moment passes from the socket to its server.
        await asyncio.sleep(0.5)
        async with listening([]) as (helper,):
            assert helper.vocab_size == VOCAB
            for drafts in (True, False, True):
                await helper.tell(drafts)
                await asyncio.to_thread(engine.until, lambda _, drafts=drafts: helper_process.awaits is drafts)
            await helper.tell(None, over=True)
            assert helper.rates


async def test_a_verifier_around_vllm_tells_its_helper_what_to_do_and_is_told_what_it_has_learned(
    tiny_pair, engines
) -> None:
    target, draft = tiny_pair
    async with running_drafter(draft) as (address, host):
        engine = Engine(target, address)
        engines.append(engine)
        engine.batch.admit("a", [1, 2, 3])
        helper_process = engine.proposer.client._helper
        line, linked = HelperLine(partial(helper_socket, engine.instance_id)), asyncio.Queue[str]()
        running = asyncio.create_task(line.run(linked.put_nowait))
        assert await asyncio.wait_for(linked.get(), PATIENCE_S) == host.identity.weights_hash
        for drafts in (True, False, True):
            line.rehearse(drafts)
            await asyncio.to_thread(engine.until, lambda _, drafts=drafts: helper_process.awaits is drafts)
        counted = await asyncio.to_thread(engine.metrics)
        assert "paceline:gamma_count 0.0" in counted, "nobody has asked for these steps"
        line.rehearse(None, over=True)
        learned = await line.learned()
        assert learned["policy"][REHEARSED] == host.identity.weights_hash
        # Between two orders others are heard.
        async with listening([]) as (helper,):
            assert helper.learned["policy"][REHEARSED] == host.identity.weights_hash
            asked = asyncio.create_task(line.learned())
            await asyncio.sleep(0.2)
            assert not asked.done(), "another one has its say"
        assert (await asked)["policy"][REHEARSED] == host.identity.weights_hash
        line.teach(json.dumps(learned | {"policy": learned["policy"] | {"mode_rates": [3.0, 1.0, 0.0, 2.0]}}).encode())
        assert (await line.learned())["policy"]["mode_rates"][-4:] == [3.0, 1.0, 0.0, 2.0]
        running.cancel()


async def test_without_drafters_vllm_goes_on_and_they_are_found_when_they_come(tiny_pair, engines) -> None:
    target, draft = tiny_pair
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    engine = Engine(target, f"127.0.0.1:{port}")
    engines.append(engine)
    engine.batch.admit("a", [1, 2, 3])
    await asyncio.to_thread(engine.until, lambda _: len(engine.batch.texts["a"]) > 40)
    assert not engine.proposer.client.failures
    async with running_drafter(draft, port=port):
        await asyncio.to_thread(engine.until, all)
    end = len(engine.batch.texts["a"]) + 40
    guesses = await asyncio.to_thread(engine.until, lambda _: len(engine.batch.texts["a"]) > end)
    assert guesses == [[]]
