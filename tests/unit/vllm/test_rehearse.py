"""`paceline rehearse` beside a server that speaks as vLLM does, and the policy of a helper that it tells the mode."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from paceline.client import rehearse
from paceline.core.draft_policy import Goodput
from paceline.core.drafting_mode import Mode
from paceline.core.errors import ConfigError, UnavailableError
from paceline.vllm import rehearsal
from paceline.vllm.places import mode_socket
from paceline.vllm.rehearsal import Rehearsal
from tests.support.fuzzing import until

VOCAB, PLACES = 800, 8
STEP_S = 0.01
# After which no further text is expected.
PATIENCE_S = 0.3


class FakeVllm:
    """Its steps teach a policy: with drafts each session gets two tokens, in a time that grows with the load.

    A step waits for a text in the place of each that has ended, so that nothing depends on how fast clients are.

    Attributes:
        asked: Bodies of the texts that were asked for.
        steps: How often how many sessions were in a step, by whether it drafted.
        answered: Whether there is a drafter that answers.
        refuses: Texts are refused.
    """

    def __init__(self) -> None:
        self.policy = Goodput(max_nodes=7)
        self.asked: list[dict[str, Any]] = []
        self.steps: Counter[tuple[int, bool]] = Counter()
        self.answers, self.refuses = True, False
        self._left: dict[asyncio.Event, int] = {}
        self._arrived = asyncio.Event()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        steps = asyncio.create_task(self._run())
        async with TestServer(app) as server:
            yield str(server.make_url("")).rstrip("/")
        assert not steps.done(), "steps went on to the end"
        steps.cancel()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "target"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        self.asked.append(body := await request.json())
        if self.refuses:
            return web.json_response({"error": {"message": "too long"}}, status=400)
        done = asyncio.Event()
        self._left[done] = body["max_tokens"]
        self._arrived.set()
        try:
            await done.wait()
        finally:
            self._left.pop(done, None)
        return web.json_response({"choices": [{"text": "x"}]})

    async def _run(self) -> None:
        running = 0
        while True:
            while len(self._left) < max(running, 1):
                self._arrived.clear()
                try:
                    await asyncio.wait_for(self._arrived.wait(), PATIENCE_S)
                except TimeoutError:
                    running = len(self._left)
            await asyncio.sleep(0.0)
            running = len(self._left)
            if not running:
                continue
            rows = [*self._left][:PLACES]
            drafts = self.policy.enter(max(1, len(rows)))
            self.policy.responded = self.answers or not drafts
            self.steps[len(rows), drafts] += 1
            for row in rows:
                self._left[row] -= 1 + drafts
                if self._left[row] <= 0:
                    del self._left[row]
                    row.set()
            self.policy.observe(
                roots=len(rows),
                guesses=drafts * len(rows),
                tokens=(1 + drafts) * len(rows),
                step_s=(seconds := STEP_S * (1.0 + drafts * 0.17 * len(rows))),
                cycle_s=seconds,
            )


@asynccontextmanager
async def helper_at(path: Path, policy: Goodput) -> AsyncIterator[None]:
    rehearsal = Rehearsal(policy, policy, VOCAB)
    rehearsal.drafter = "draft"
    server = await asyncio.start_unix_server(rehearsal.serve, path)
    yield
    server.close()


@pytest.fixture
def helper_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return mode_socket("17", 0)


@pytest.fixture
async def vllm(helper_path: Path) -> AsyncIterator[tuple[FakeVllm, str]]:
    fake = FakeVllm()
    async with fake.serving() as url, helper_at(helper_path, fake.policy):
        yield fake, url


async def command(*argv: str) -> None:
    await asyncio.to_thread(rehearse.main, argv)


async def test_both_modes_are_known_at_every_load_that_the_server_takes(
    vllm: tuple[FakeVllm, str], capsys: pytest.CaptureFixture[str]
) -> None:
    fake, url = vllm
    await command(url)
    for load in range(4):
        rates = fake.policy.mode.loads[load].rates
        assert rates[Mode.PLAIN].is_known
        assert rates[Mode.DRAFTING].is_known
    modes = [fake.policy.mode.loads[load].mode for load in range(4)]
    assert modes == [Mode.DRAFTING, Mode.DRAFTING, Mode.DRAFTING, Mode.PLAIN]
    assert fake.policy.mode.rehearsing is None
    assert fake.policy.rehearsed
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(line[0], *line[3:-1]) for line in lines] == [
        ("1", "drafts"),
        ("2", "drafts"),
        ("4", "drafts"),
        ("8", "decodes", "plainly"),
    ]
    # Two tokens in 1.17, 1.34, 1.68 and 2.36 times the time; the first steps of a load may lack a stream.
    assert [float(line[-1].strip("()")) for line in lines] == pytest.approx([1.71, 1.49, 1.19, 0.85], abs=0.14)


async def test_its_texts_are_short_and_alike_and_greedy_or_not_by_turns(vllm: tuple[FakeVllm, str]) -> None:
    fake, url = vllm
    await command("--url", url, "--streams", "1")
    assert [body["temperature"] for body in fake.asked[:4]] == [0.0, 0.8, 0.0, 0.8]
    assert all(body["ignore_eos"] and body["model"] == "target" for body in fake.asked)
    assert all(VOCAB / 8 <= token < VOCAB / 2 for body in fake.asked for token in body["prompt"])
    assert {sessions for sessions, _ in fake.steps} == {1}


async def test_users_are_served_as_pays_once_the_command_has_died(
    vllm: tuple[FakeVllm, str], helper_path: Path
) -> None:
    fake, _ = vllm
    async with rehearse.listening([]) as (helper,):
        await helper.tell(True)
        assert fake.policy.mode.rehearsing is Mode.DRAFTING
    await until(lambda: fake.policy.mode.rehearsing is None)
    assert not fake.policy.rehearsed


async def test_a_command_that_hangs_loses_its_say(vllm: tuple[FakeVllm, str], monkeypatch: pytest.MonkeyPatch) -> None:
    fake, _ = vllm
    monkeypatch.setattr(rehearsal, "SILENCE_S", 0.05)
    async with rehearse.listening([]) as (helper,):
        with suppress(UnavailableError):
            await helper.tell(False)
        await until(lambda: fake.policy.mode.rehearsing is None)
        with pytest.raises(UnavailableError, match="it has ended"):
            await helper.tell(False)


@pytest.mark.parametrize("line", ["7", "{", '{"drafts": 1, "over": false}', '{"drafts": true}'])
async def test_what_the_helper_does_not_understand_changes_nothing(
    vllm: tuple[FakeVllm, str], helper_path: Path, line: str
) -> None:
    fake, _ = vllm
    reader, writer = await asyncio.open_unix_connection(helper_path)
    writer.write(f"{line}\n".encode())
    assert "error" in json.loads(await reader.readline())
    assert fake.policy.mode.rehearsing is None
    writer.close()


def _elsewhere(fake: FakeVllm) -> None:
    fake.policy = Goodput(max_nodes=7)


def _without_drafter(fake: FakeVllm) -> None:
    fake.answers = False


def _refusing(fake: FakeVllm) -> None:
    fake.refuses = True


@pytest.mark.parametrize(
    ("changes", "argv", "said"),
    [
        (None, ["--model", "other"], "--model other: no such model is served; there are: target"),
        (None, ["--url", "http://127.0.0.1:1"], "the server at http://127.0.0.1:1 cannot be reached"),
        (None, ["--helper", "/nowhere/17-0.mode"], "--helper /nowhere/17-0.mode: no helper listens there"),
        (None, ["--streams", "0"], "--streams must be"),
        (_elsewhere, [], "17-0.mode: has seen no text of"),
        (_without_drafter, [], "no drafter has drafted"),
        (_refusing, [], "refuses a text: too long"),
    ],
)
async def test_what_is_wrong_is_said_in_one_line_and_no_mode_stays(
    vllm: tuple[FakeVllm, str],
    capsys: pytest.CaptureFixture[str],
    changes: Callable[[FakeVllm], None] | None,
    argv: list[str],
    said: str,
) -> None:
    fake, url = vllm
    policy = fake.policy
    if changes is not None:
        changes(fake)
    with pytest.raises((SystemExit, ConfigError)) as caught:
        await command(*([] if "--url" in argv else ["--url", url]), *argv)
    lines = capsys.readouterr().err.splitlines() or [str(caught.value)]
    assert said in lines[-1]
    await until(lambda: policy.mode.rehearsing is None)
    assert not policy.rehearsed


async def test_a_second_command_is_refused(vllm: tuple[FakeVllm, str], helper_path: Path) -> None:
    async with rehearse.listening([helper_path]):
        with pytest.raises(UnavailableError, match="another rehearsal is under way"):
            async with rehearse.listening([helper_path]):
                pass


async def test_without_a_flag_the_only_helper_that_lives_is_told(vllm: tuple[FakeVllm, str]) -> None:
    fake, _ = vllm
    # A helper that was killed has left its socket.
    dead = await asyncio.start_unix_server(lambda *_: None, mode_socket("16", 0))
    dead.close()
    async with rehearse.listening([]) as helpers:
        assert [helper.path.name for helper in helpers] == ["17-0.mode"]
    async with helper_at(mode_socket("18", 0), fake.policy):
        with pytest.raises(ConfigError, match=r"--helper: name those of one vLLM: .*17-0.mode, .*18-0.mode"):
            async with rehearse.listening([]):
                pass


async def test_without_a_vllm_the_folder_is_named(helper_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no helper .* {helper_path.parent}"):
        async with rehearse.listening([]):
            pass


async def test_a_vllm_of_several_engines_has_its_streams_shared_among_them(
    vllm: tuple[FakeVllm, str], helper_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, url = vllm
    second = FakeVllm()
    other = mode_socket("17_dp1", 1)
    async with helper_at(other, second.policy):
        await command(url, "--streams", "2", "--helper", str(helper_path), "--helper", str(other))
    assert fake.policy.rehearsed
    assert second.policy.rehearsed
    assert "; not seen\n" in capsys.readouterr().out
