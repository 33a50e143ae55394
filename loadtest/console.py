"""Screenshots of the console, light and dark, for the docs: `make bench NAME=console`.

A real fleet under a load that comes and goes; after a while the playground is run in the page, and what Chromium shows
then is what stands in docs/console.md.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from playwright.async_api import Page

from loadtest.browser import browsing, chromium, problems_of
from loadtest.client import Ask, complete, http_client
from loadtest.flags import bench_parser
from loadtest.fleet import bench_fleet
from paceline.checkpoints.corpus import unseen_prompts

WIDTH, HEIGHT = 1320, 1200
MAX_TOKENS = 72
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
PLAYGROUND_TIMEOUT_MS = 300_000


def main() -> None:
    """Parses the command line and takes the pictures."""
    parser = bench_parser("console", __doc__)
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the pictures (default docs)")
    parser.add_argument("--seconds", type=float, default=90.0, help="load before the pictures (default 90)")
    parser.add_argument("--streams", type=int, default=6, help="most streams at once (default 6)")
    parser.add_argument("--url", help="a gateway that serves already; without it a fleet of its own")
    raise SystemExit(asyncio.run(run(parser.parse_args())))


async def run(options: argparse.Namespace) -> int:
    """Takes both pictures; returns the exit status."""
    program = chromium()
    if program is None:
        print("no Chromium is installed here")
        return 1
    async with gateway(options.url) as url, browsing(program) as browser:
        page = await browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        problems = problems_of(page)
        await page.goto(url)
        async with load(url, options.streams):
            await asyncio.sleep(options.seconds)
            await page.fill("#max-tokens", str(MAX_TOKENS))
            await page.click("#run")
            await page.wait_for_selector("#verdict[data-state]:not([data-state=''])", timeout=PLAYGROUND_TIMEOUT_MS)
            for scheme in SCHEMES:
                print(await picture(page, scheme, options.out))
        print(*problems, sep="\n")
    return 1 if problems else 0


@asynccontextmanager
async def gateway(url: str | None) -> AsyncIterator[str]:
    """Where to look: a gateway that is there, or that of a fleet of two verifiers and two drafters."""
    if url is not None:
        yield url
        return
    async with bench_fleet(num_verifiers=2, num_drafters=2, dtype="float32", pin=False, lend=False) as fleet:
        yield fleet.gateway_url


async def picture(page: Page, scheme: Scheme, folder: Path) -> Path:
    """Takes one picture of the whole page."""
    await page.emulate_media(color_scheme=scheme)
    # One more frame, so that all is drawn in the new colours.
    await asyncio.sleep(1.5)
    path = folder / f"console-{scheme}.png"
    await page.screenshot(path=path, full_page=True)
    return path


@asynccontextmanager
async def load(url: str, num_streams: int) -> AsyncIterator[None]:
    """Streams that come and go while a block runs."""
    prompts = unseen_prompts(4 * num_streams)
    async with http_client() as client:

        async def stream(index: int) -> None:
            chance = random.Random(index)
            while True:
                await asyncio.sleep(chance.uniform(0.0, 3.0))
                ask = Ask(
                    prompt=chance.choice(prompts),
                    max_tokens=chance.randrange(64, 320),
                    temperature=chance.choice([0.0, 0.0, 0.8]),
                    seed=chance.randrange(1000),
                )
                await complete(client, url, ask)

        streams = [asyncio.create_task(stream(index)) for index in range(num_streams)]
        try:
            yield
        finally:
            for each in streams:
                each.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
