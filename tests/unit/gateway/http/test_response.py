"""Events come in order, sessions of a request end together, and nothing is left running."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from paceline.core.errors import UnavailableError
from paceline.gateway.api.openai.endpoint import together
from paceline.gateway.http import response
from paceline.gateway.http.errors import ClientStalledError
from paceline.gateway.http.response import Exchange, until_disconnect


class Client:
    """Takes an answer: at once while it keeps up, otherwise when it gets to it."""

    def __init__(self) -> None:
        self.keeps_up = True
        self.got = b""
        self.statuses: list[int] = []
        self._may_take = asyncio.Event()
        self._more = asyncio.Event()

    def write_now(self, part: bytes) -> bool:
        takes = self.keeps_up and bool(self.statuses)
        self._take(part if takes else b"")
        return takes

    async def send(self, message: Any) -> None:
        if not self.keeps_up:
            await self._may_take.wait()
        if "status" in message:
            self.statuses.append(message["status"])
        self._take(message.get("body", b""))

    def _take(self, part: bytes) -> None:
        self.got += part
        self._more.set()

    async def has(self, part: bytes) -> None:
        """Returns when it has got something."""
        async with asyncio.timeout(10.0):
            while part not in self.got:
                self._more.clear()
                await self._more.wait()

    def read_on(self) -> None:
        self.keeps_up = True
        self._may_take.set()


@pytest.fixture
def client() -> Client:
    return Client()


@pytest.fixture
def exchange(client: Client) -> Exchange:
    return Exchange(client.send, write_now=client.write_now)


def events(numbers: Any) -> bytes:
    return b"".join(b"data: %d\n\n" % number for number in numbers)


async def test_events_come_in_order_though_the_client_is_behind_for_a_while(client: Client, exchange: Exchange) -> None:
    for number in range(9):
        client.keeps_up = number < 3
        exchange.event(number)
        await asyncio.sleep(0)
    assert client.got == events(range(3))
    client.read_on()
    # What is written now must not overtake what waits.
    exchange.json_event(b"9")
    await exchange.end(b"end")
    assert client.got == events(range(10)) + b"end"


async def test_an_event_that_takes_long_to_make_comes_before_later_ones(
    client: Client, exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response, "SLICE_S", 0.0)
    exchange.event({"long": iter(range(100))})
    exchange.event(1)
    await exchange.end()
    assert client.got == b'data: {"long":[%b]}\n\n' % b",".join(b"%d" % each for each in range(100)) + events([1])


async def test_a_client_that_does_not_read_is_left_a_bounded_number_of_bytes(
    client: Client, exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response, "CLIENT_BYTES", 1000)
    client.keeps_up = False
    exchange.json_event(bytes(5000))
    await asyncio.sleep(0)
    with pytest.raises(ClientStalledError, match="does not read"):
        for _ in range(20):
            exchange.json_event(bytes(100))
    client.read_on()
    await exchange.fail(UnavailableError("told"))
    assert b"told" in client.got
    assert len(client.got) < 6500


async def test_as_much_may_wait_for_a_client_as_its_sessions_are_allowed(
    client: Client, exchange: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response, "CLIENT_BYTES", 1000)
    client.keeps_up, exchange.num_sessions = False, 3
    for _ in range(25):
        exchange.json_event(bytes(100))
    with pytest.raises(ClientStalledError):
        for _ in range(5):
            exchange.json_event(bytes(100))


async def test_whoever_writes_for_a_client_that_has_left_is_not_cancelled(client: Client, exchange: Exchange) -> None:
    client.keeps_up = False
    exchange.event(1)
    await asyncio.sleep(0)
    exchange.close()
    await asyncio.sleep(0)
    with pytest.raises(ClientDisconnect):
        exchange.event(2)


async def test_an_error_comes_after_the_events_before_it(client: Client, exchange: Exchange) -> None:
    client.keeps_up = False
    exchange.event(1)
    client.read_on()
    await exchange.fail(UnavailableError("told"))
    assert client.got.startswith(events([1]))


PING = b": ping\n\n"


@pytest.fixture
def patient(client: Client) -> Iterator[Exchange]:
    """Fills silence."""
    exchange = Exchange(client.send, write_now=client.write_now, ping_s=0.01)
    yield exchange
    exchange.close()


async def test_silence_of_a_stream_is_filled_with_its_head_and_pings_and_nothing_follows_its_end(
    client: Client, patient: Exchange
) -> None:
    """nginx ended three of four streams that waited for a place with 504."""
    patient.ping_while_silent()
    await client.has(PING)
    patient.event(1)
    await client.has(events([1]) + PING)
    await patient.end()
    assert client.statuses == [200]
    told = client.got
    await asyncio.sleep(0.05)
    assert client.got == told


async def test_a_refusal_before_the_first_ping_has_its_own_status(client: Client) -> None:
    exchange = Exchange(client.send, write_now=client.write_now, ping_s=60.0)
    exchange.ping_while_silent()
    await exchange.fail(UnavailableError("no verifier"))
    assert client.statuses == [503]


async def test_an_error_behind_a_ping_is_an_event(client: Client, patient: Exchange) -> None:
    patient.ping_while_silent()
    await client.has(PING)
    await patient.fail(UnavailableError("no verifier"))
    assert client.statuses == [200]
    assert client.got.endswith(b"data: [DONE]\n\n")


async def test_a_client_that_is_behind_gets_no_pings(client: Client, patient: Exchange) -> None:
    client.keeps_up = False
    patient.ping_while_silent()
    patient.event(1)
    await asyncio.sleep(0.05)
    client.read_on()
    await client.has(PING)
    assert client.got.startswith(events([1]))
    assert client.got.count(PING) == 1


class Runs:
    """Sessions that remember how they ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def run(self, name: str, error: Exception | None = None) -> None:
        try:
            await asyncio.sleep(0 if error else 3600)
            if error is not None:
                raise error
        finally:
            self.ended.append(name)


@pytest.mark.parametrize("others", [[], ["b", "c"]])
async def test_the_first_error_ends_all_sessions_of_a_request(others: list[str]) -> None:
    runs = Runs()
    coroutines: list[Coroutine[Any, Any, None]] = [runs.run("a", ValueError("broken")), *map(runs.run, others)]
    with pytest.raises(ValueError, match="broken"):
        await together(iter(coroutines))
    assert sorted(runs.ended) == sorted(["a", *others])


async def test_a_request_that_is_cancelled_ends_its_sessions() -> None:
    runs = Runs()
    task = asyncio.create_task(together(map(runs.run, ["a", "b"])))
    for _ in range(9):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert sorted(runs.ended) == ["a", "b"]


async def test_work_ends_when_the_client_leaves_and_its_cleaning_up_is_awaited() -> None:
    started, cleaned = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    async def receive() -> dict[str, str]:
        await started.wait()
        return {"type": "http.disconnect"}

    await until_disconnect(receive, work())
    assert cleaned.is_set()


async def test_an_error_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise ValueError("broken")

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        return {}

    with pytest.raises(ValueError, match="broken"):
        await until_disconnect(receive, work())


async def test_an_error_of_the_cleanup_is_raised_though_the_client_has_left() -> None:
    started = asyncio.Event()

    async def work() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            raise ValueError("the place was not given back")

    async def receive() -> dict[str, str]:
        await started.wait()
        return {"type": "http.disconnect"}

    with pytest.raises(ValueError, match="the place was not given back"):
        await until_disconnect(receive, work())
