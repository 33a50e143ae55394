"""Faults of the API key file while it is in use: broken in the middle of a change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from paceline.gateway.access.keys import KeyConfig, line_of, new_key

STAYS, LEAVES = "stays", "leaves"
# A gateway rereads the file every two seconds; one that is frozen meanwhile does so when it wakes.
GONE_WITHIN_S = 12.0
POLL_S = 0.1
# A line without its end, one that is none, bytes that are no text, and one of a name that is there already.
BROKEN = (b"half:0123456789abcdef", b"::::", b"\xff\xfe\x00 \x80", b"stays:" + 64 * b"0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """Outcome of a key that was withdrawn in a change that broke the file.

    Attributes:
        gone_s: When each gateway that could be reached refused it, in seconds after the change.
        num_left: Gateways that still took it at the end of `GONE_WITHIN_S`.
    """

    gone_s: Sequence[float]
    num_left: int


class KeyFile:
    """A file of two keys: one that stays, and one that leaves when the file breaks.

    Args:
        path: Where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stays, self._leaves = new_key(), new_key()
        self._write(whole=True)

    @asynccontextmanager
    async def broken(self, urls: Iterable[str]) -> AsyncIterator[Withdrawn]:
        """Breaks the file while a block runs, which begins when the key that left is gone; then makes it whole.

        Args:
            urls: URLs of the gateways.
        """
        self._write(whole=False)
        try:
            gone_s = await asyncio.gather(*(self._until_gone(url) for url in urls))
            known = [each for each in gone_s if each is not None]
            yield Withdrawn(
                gone_s=[each for each in known if each < GONE_WITHIN_S],
                num_left=sum(each >= GONE_WITHIN_S for each in known),
            )
        finally:
            self._leaves = new_key()
            self._write(whole=True)

    def _write(self, *, whole: bool) -> None:
        """Writes it in one step, as an editor or Kubernetes does."""
        stays, leaves = (
            line_of(KeyConfig(name=name), key).encode() for name, key in ((STAYS, self.stays), (LEAVES, self._leaves))
        )
        new = self.path.with_suffix(".new")
        new.write_bytes(b"\n".join((stays, leaves) if whole else (BROKEN[0], stays, *BROKEN[1:])))
        new.replace(self.path)

    async def _until_gone(self, url: str) -> float | None:
        """Returns when a gateway refused the key, at most `GONE_WITHIN_S`; None: it could not be asked."""
        loop = asyncio.get_running_loop()
        begun_s, answered = loop.time(), False
        async with httpx.AsyncClient(trust_env=False, timeout=GONE_WITHIN_S) as http:
            while loop.time() < begun_s + GONE_WITHIN_S:
                try:
                    answer = await http.get(f"{url}/v1/models", headers={"authorization": f"Bearer {self._leaves}"})
                except httpx.HTTPError:
                    answered = False
                else:
                    answered = True
                    if answer.status_code == httpx.codes.UNAUTHORIZED:
                        return min(loop.time() - begun_s, GONE_WITHIN_S)
                await asyncio.sleep(POLL_S)
        return GONE_WITHIN_S if answered else None
