"""`paceline rehearse`: shows the controller of the tier under vLLM what drafting is worth, before users ask.

From outside it sends vLLM the load that a verifier of ours sends itself, and sets in the helper beside vLLM which
steps draft. The helper learns from these steps as from users'.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import cycle, islice, starmap
from math import isclose, log2
from pathlib import Path

import httpx
from tqdm import tqdm

from paceline.client.server import ServerConfig, chosen_model, connection, error_message, reached
from paceline.core.errors import ConfigError, PacelineError, UnavailableError
from paceline.service.config import parse, setting
from paceline.service.learned import Learned
from paceline.service.process import run
from paceline.vllm.places import mode_sockets, runtime_folder
from paceline.vllm.rehearsal import LINE_BYTES

PROG = "paceline rehearse"
DESCRIPTION = """Shows the drafter tier under vLLM what drafting is worth, before users ask: at 1, 2, 4, ... streams it
has URL continue short random prompts, greedily and at temperature 0.8 by turns, first plainly and then with drafts.
Run it once vllm serve and its drafters are up, on vLLM's host and as its user (in its container):
paceline rehearse http://127.0.0.1:8000. It takes one to two minutes. Users who ask meanwhile are served in the mode
that is being tried. The result is kept with what the helper learns (learned_dir); whenever the machine or the drafters
change, rehearse again. Ctrl-C ends it, and vLLM goes on with what has been seen. See docs/vllm.md."""

TEMPERATURES = (0.0, 0.8)
PROMPT_TOKENS, OUTPUT_TOKENS = 8, 48
# Texts of each stream in a mode at a load: one begun in the other mode, then one greedy and one not, which count.
UNCOUNTED, TEXTS = 1, 2
# Shares of the vocabulary that bound prompt tokens: special tokens lie at its ends.
USUAL_TOKENS = 0.125, 0.5
# Period at which the helper gets the mode, and its longest time to answer.
PULSE_S, HELPER_S = 0.1, 10.0
# Whether steps draft, in the order of tries.
MODES = (False, True)
UNKNOWN = 0.0, 0.0
HEADS = ("streams", "plain tokens/s", "drafting tokens/s", "from now on (gain of steps that draft)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearseConfig(ServerConfig):
    """Flags of `paceline rehearse`."""

    helper: tuple[Path, ...] = setting(
        (),
        help="Unix socket of vLLM's helper, such as /tmp/paceline-vllm-1000/ID-0.mode; several for a vLLM of several "
        "engines. Without it the only one that this user has here.",
    )
    streams: int = setting(32, help="Most streams at once.", low=1, high=4096)
    timeout_s: float = setting(300.0, help="Longest wait for a text of 48 tokens.", unit="seconds", low=0.1)


class HelperLink:
    """A helper that listens.

    Attributes:
        vocab_size: The target's vocabulary size.
        rates: Rates of plain steps and of steps that draft, by the logarithm of their sessions to the base 2; 0:
            not known.
        learned: All that the helper has learned.
    """

    def __init__(self, path: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.path, self._reader, self._writer = path, reader, writer
        self.vocab_size = 0
        self.rates: dict[int, tuple[float, float]] = {}
        self.learned: Learned = {}

    async def tell(self, drafts: bool | None, *, over: bool = False) -> None:
        """Has vLLM's next steps draft or not; None: as pays.

        Args:
            over: All that was to be seen has been.

        Raises:
            UnavailableError: The helper has ended, or refuses.
        """
        try:
            self._writer.write(json.dumps({"drafts": drafts, "over": over}).encode() + b"\n")
            said = json.loads(await asyncio.wait_for(self._reader.readline(), HELPER_S))
        except (OSError, TimeoutError, ValueError) as error:
            raise UnavailableError(f"--helper {self.path}: it has ended: {error!r}") from None
        if "error" in said:
            raise UnavailableError(f"--helper {self.path}: {said['error']}")
        self.vocab_size, self.learned = said["vocab_size"], said["learned"]
        known = zip(*[iter(said["rates"])] * 4, strict=True)
        # Sources inside the verifier have a rate, too; vLLM's have none.
        self.rates = {int(at): (plain, drafting) for at, plain, _, drafting in known}


def main(argv: Sequence[str]) -> None:
    config = parse(RehearseConfig, argv, os.environ, PROG, DESCRIPTION, first="url")
    sys.stdout.write(table(run(rehearse(config), prog=PROG)))


async def rehearse(config: RehearseConfig) -> list[Sequence[str]]:
    """Rehearses at all loads that the server takes; returns rows of a table.

    Raises:
        PacelineError: Server, model or helper is not there, or a text is refused; names the flag.
    """
    timeout = httpx.Timeout(config.timeout_s)
    with reached(config.url), httpx.Client(**connection(config), timeout=timeout) as client:
        model = chosen_model(client, config.model)
    limits = httpx.Limits(max_connections=None)
    async with (
        listening(config.helper) as helpers,
        httpx.AsyncClient(**connection(config), timeout=timeout, limits=limits) as http,
    ):
        return await _Rehearsal(http, model, helpers).run([2**power for power in range(config.streams.bit_length())])


@asynccontextmanager
async def listening(paths: Sequence[Path]) -> AsyncIterator[list[HelperLink]]:
    """Connects to helpers: those at these sockets, or this user's only one here.

    Raises:
        ConfigError: A helper does not listen, or it is not clear which is meant.
    """
    async with AsyncExitStack() as stack:
        helpers: list[HelperLink] = []
        for path in paths or mode_sockets():
            try:
                helpers.append(await _connected(path, stack))
            except ConfigError:
                # A helper that was killed leaves its socket behind.
                if paths:
                    raise
        if not helpers:
            raise ConfigError(
                f"--helper: no helper of a vLLM listens in {runtime_folder()}; it starts some seconds after vLLM"
            )
        if not paths and len(helpers) > 1:
            raise ConfigError(f"--helper: name those of one vLLM: {', '.join(str(each.path) for each in helpers)}")
        yield helpers


async def _connected(path: Path, stack: AsyncExitStack) -> HelperLink:
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=LINE_BYTES)
    except OSError as error:
        raise ConfigError(
            f"--helper {path}: no helper listens there; it starts some seconds after vLLM: {error}"
        ) from None
    stack.callback(writer.close)
    helper = HelperLink(path, reader, writer)
    await helper.tell(None)
    return helper


class _Rehearsal:
    def __init__(self, http: httpx.AsyncClient, model: str, helpers: Sequence[HelperLink]) -> None:
        self._http, self._model, self._helpers = http, model, helpers
        low, high = (int(share * helpers[0].vocab_size) for share in USUAL_TOKENS)
        self._tokens = range(low, max(high, low + 1))
        # When each text was complete.
        self._done_s: list[float] = []

    async def run(self, loads: Sequence[int]) -> list[Sequence[str]]:
        """Tries both modes at each load, until one is above the server's places."""
        found: dict[int, list[float]] = {}
        with tqdm(total=len(MODES) * (UNCOUNTED + TEXTS) * sum(loads), unit="text", leave=False) as bar:
            for streams in loads:
                before = self._rates(streams)
                speeds = await self._load(streams, bar)
                if not self._has_shown(streams, before):
                    break
                found[streams] = speeds
        await self._tell(None, over=True)
        return [
            (str(streams), *(f"{speed:,.0f}" for speed in speeds), "; ".join(starmap(_choice, self._rates(streams))))
            for streams, speeds in found.items()
        ]

    async def _load(self, streams: int, bar: tqdm) -> list[float]:
        """Tokens/s of each mode."""
        texts = [asyncio.create_task(self._stream(number)) for number in range(streams)]
        try:
            return [await self._turn(mode, texts, bar) for mode in MODES]
        finally:
            for text in texts:
                text.cancel()
            await asyncio.gather(*texts, return_exceptions=True)

    async def _turn(self, mode: bool, streams: Sequence[asyncio.Task[None]], bar: tqdm) -> float:
        """Tokens/s of one mode, while streams go on."""
        bar.set_description(f"{len(streams)} streams, {'drafting' if mode else 'plain'}")
        await self._tell(mode)
        before, done = len(self._done_s), 0
        wanted = (UNCOUNTED + TEXTS) * len(streams)
        while done < wanted:
            broken, _ = await asyncio.wait(streams, timeout=PULSE_S, return_when=asyncio.FIRST_EXCEPTION)
            for stream in broken:
                stream.result()
            # Again, so that the helper hears of us, and we of what it has seen.
            await self._tell(mode)
            now = min(len(self._done_s) - before, wanted)
            bar.update(now - done)
            done = now
        done_s = self._done_s[before : before + wanted]
        return TEXTS * len(streams) * OUTPUT_TOKENS / (done_s[-1] - done_s[UNCOUNTED * len(streams) - 1])

    async def _stream(self, number: int) -> None:
        """Asks for one text after another, greedy or not by turns."""
        for temperature in islice(cycle(TEMPERATURES), number, None):
            body = {
                "model": self._model,
                "prompt": random.choices(self._tokens, k=PROMPT_TOKENS),
                "max_tokens": OUTPUT_TOKENS,
                "temperature": temperature,
                "ignore_eos": True,
            }
            with reached(str(self._http.base_url)):
                answer = await self._http.post("/v1/completions", json=body)
            if answer.status_code != httpx.codes.OK:
                raise PacelineError(f"{self._http.base_url} refuses a text: {error_message(answer.text)}")
            self._done_s.append(time.monotonic())

    async def _tell(self, drafts: bool | None, *, over: bool = False) -> None:
        await asyncio.gather(*(helper.tell(drafts, over=over) for helper in self._helpers))

    def _rates(self, streams: int) -> list[tuple[float, float]]:
        """Rates of each helper for its share of so many streams."""
        place = round(log2(max(1.0, streams / len(self._helpers))))
        return [helper.rates.get(place, UNKNOWN) for helper in self._helpers]

    def _has_shown(self, streams: int, before: Sequence[tuple[float, float]]) -> bool:
        """Whether helpers have seen so many streams.

        Raises:
            UnavailableError: They have not even seen one, or no drafter has drafted for it.
        """
        pairs = [*zip(self._rates(streams), before, strict=True)]
        seen, drafted = (any(not isclose(now[mode], old[mode]) for now, old in pairs) for mode in MODES)
        if streams > 1:
            return seen or drafted
        if not seen:
            names = ", ".join(str(helper.path) for helper in self._helpers)
            raise UnavailableError(f"--helper {names}: has seen no text of {self._http.base_url}; is that its vLLM?")
        if not drafted:
            raise UnavailableError(f"no drafter has drafted for {self._http.base_url}: is one linked? See vLLM's log")
        return True


def _choice(plain: float, drafting: float) -> str:
    """The controller's choice for these rates."""
    if not plain:
        return "not seen"
    return f"{'drafts' if drafting > plain else 'decodes plainly'} ({drafting / plain:.2f})"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Lines for a terminal."""
    rows = [HEADS, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join("  ".join(map(str.rjust, row, widths)) + "\n" for row in rows)
