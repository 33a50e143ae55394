"""Pictures of the console for its page, light and dark: `python -m tests.support.pictures --seconds 60 --streams 3`.

A real fleet under a load that comes and goes; after a while the playground runs in the page, and what Chromium shows
then goes into docs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Literal

from loadtest.bench import bench_parser, run
from loadtest.fleet import bench_fleet
from loadtest.streams import Ask, HttpDoor

from paceline.checkpoints.corpus import unseen_prompts
from tests.support.browser import browsing, chromium, problems_of

# The picture is as high as the page.
WIDTH, LEAST_HEIGHT = 1320, 600
MAX_TOKENS = 72
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
PLAYGROUND_TIMEOUT_MS = 300_000


def main() -> None:
    """Parses the command line and takes the pictures."""
    parser = bench_parser("pictures", __doc__)
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the pictures (default docs)")
    parser.add_argument("--seconds", type=float, default=90.0, help="load before the pictures (default 90)")
    parser.add_argument("--streams", type=int, default=2, help="most streams at once (default 2)")
    parser.add_argument("--width", type=int, default=WIDTH, help=f"of the window, in pixels (default {WIDTH})")
    parser.add_argument("--url", help="a gateway that serves already; without it a fleet of its own")
    run(parser, take)


async def take(options: argparse.Namespace) -> bool:
    """Takes both pictures, if they show a gain; returns whether the page worked."""
    program = chromium()
    if program is None:
        sys.stderr.write("no Chromium is installed here\n")
        return False
    async with AsyncExitStack() as stack:
        url = options.url
        if url is None:
            fleet = bench_fleet()
            url = (await stack.enter_async_context(fleet)).gateway_url
        browser = await stack.enter_async_context(browsing(program))
        page = await browser.new_page(viewport={"width": options.width, "height": LEAST_HEIGHT})
        problems = problems_of(page)
        await page.goto(url)
        streams = [asyncio.create_task(stream(url, index, options.streams)) for index in range(options.streams)]
        await asyncio.sleep(options.seconds)
        await page.fill("#max_tokens", str(MAX_TOKENS))
        await page.click("#run")
        await page.wait_for_selector("#verdict[data-state]:not([data-state=''])", timeout=PLAYGROUND_TIMEOUT_MS)
        verdict = await page.text_content("#verdict") or ""
        gain = re.search(r"([\d.]+) . the speed", verdict)
        if gain is None or float(gain[1]) <= 1.0:
            sys.stderr.write(f"no picture: it would show no gain ({verdict})\n")
            return False
        for scheme in SCHEMES:
            await page.emulate_media(color_scheme=scheme)
            # One more look, so that all is drawn in the new colours.
            await asyncio.sleep(1.5)
            path = options.out / f"console-{scheme}.png"
            await page.screenshot(path=path, full_page=True)
            sys.stdout.write(f"{path}\n")
        for each in streams:
            each.cancel()
            with suppress(asyncio.CancelledError):
                await each
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    return not problems


async def stream(url: str, index: int, num_streams: int) -> None:
    """One stream that comes and goes without end."""
    chance, door = random.Random(index), HttpDoor(url)
    prompts = unseen_prompts(4 * num_streams)
    while True:
        await asyncio.sleep(chance.uniform(0.0, 3.0))
        ask = Ask(
            prompt=chance.choice(prompts),
            max_tokens=chance.randrange(64, 320),
            temperature=chance.choice([0.0, 0.0, 0.8]),
            seed=chance.randrange(1000),
        )
        await door.ask(ask)


if __name__ == "__main__":
    main()
