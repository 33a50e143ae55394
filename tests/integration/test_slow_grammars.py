"""Grammars that take long to compile: their sessions show life, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from paceline.core.errors import OverloadedError
from paceline.core.grammar import Bits
from paceline.core.messages import GenerateRequest
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.verifier import verifier_host
from paceline.verifier.verifier_host import TargetHost
from tests.integration.conftest import verifier_at
from tests.support.fuzzing import until
from tests.support.log_stream import VerifierCalls, verifier_calls


class AnyText:
    """A grammar that forbids nothing."""

    may_end = True

    def consume(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def go_back(self, count: int) -> None:
        pass

    def allowed(self) -> Bits:
        return np.full(64, 255, np.uint8)

    def forced(self) -> Sequence[int]:
        return ()


class SlowGrammars:
    """Compiles `slow` once the test allows it, and all others at once."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.compiled: list[tuple[str, bool]] = []

    def compile(self, grammar: str, tenant: str = "", *, alone: bool = False) -> AnyText:
        if grammar == "slow":
            assert self.may_end.wait(30)
        self.compiled.append((grammar, alone))
        return AnyText()


def asked(name: str, grammar: str = "", tenant: str = "", committed: tuple[int, ...] = ()) -> GenerateRequest:
    return GenerateRequest(
        session_id=name,
        epoch=1,
        prompt_token_ids=(5, 6, 7),
        committed_token_ids=committed,
        sampling=SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, grammar=grammar),
        speculation=SpeculationParams(),
        tenant=tenant,
    )


@asynccontextmanager
async def calls_of_verifier(
    folder: Path, grammars: SlowGrammars, max_num_seqs: int = 4
) -> AsyncIterator[tuple[VerifierCalls, TargetHost]]:
    async with (
        verifier_at(folder, grammars=grammars, max_num_seqs=max_num_seqs) as (address, host),
        verifier_calls(address, host.identity.vocab_size) as calls,
    ):
        yield calls, host


async def test_a_session_shows_life_while_its_grammar_is_compiled_and_then_runs(
    tiny_pair: tuple[Path, Path],
) -> None:
    grammars = SlowGrammars()
    async with calls_of_verifier(tiny_pair[0], grammars) as (calls, host):
        showing = asyncio.create_task(host._show_life())
        plain = await calls.tokens(asked("plain"))
        running = calls.running(asked("bound", "slow"))
        session = asyncio.create_task(calls.tokens_of(running))
        await until(lambda: running.taken_s is not None)
        taken_s = running.heard_s
        await until(lambda: running.heard_s > taken_s)
        # It has its place meanwhile, and the engine serves others.
        assert (host.num_sessions, running.ran) == (1, False)
        assert await calls.tokens(asked("other")) == plain
        grammars.may_end.set()
        assert await session == plain
        showing.cancel()


async def test_a_tenant_whose_grammars_are_slow_does_not_hold_up_another(tiny_pair: tuple[Path, Path]) -> None:
    grammars = SlowGrammars()
    async with calls_of_verifier(tiny_pair[0], grammars, max_num_seqs=8) as (calls, _):
        greedy = [asyncio.create_task(calls.tokens(asked(f"greedy-{at}", "slow", "greedy"))) for at in range(3)]
        await asyncio.sleep(0.1)
        modest = asyncio.create_task(calls.tokens(asked("modest", "fast", "modest")))
        await asyncio.sleep(0.1)
        grammars.may_end.set()
        await asyncio.gather(modest, *greedy)
    assert [grammar for grammar, _ in grammars.compiled].index("fast") == 1


async def test_a_grammar_that_waits_for_long_is_refused_as_overloaded_and_a_session_that_goes_on_shares_no_grammar(
    tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_host, "LONGEST_WAIT_S", 0.5)
    grammars = SlowGrammars()
    async with calls_of_verifier(tiny_pair[0], grammars) as (calls, _):
        running = asyncio.create_task(calls.tokens(asked("running", "slow")))
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(calls.tokens(asked("waiting", "fast", committed=(9, 9))))
        await asyncio.sleep(0.05)
        with pytest.raises(OverloadedError, match=r"grammars being compiled: it has waited for 0\.5 s"):
            await waiting
        grammars.may_end.set()
        await running
        await calls.tokens(asked("again", "fast", committed=(9, 9)))
    assert grammars.compiled == [("slow", False), ("fast", True)]
