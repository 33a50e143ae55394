"""The delaying proxy: bytes come out as they went in, in order, and an end in one direction is an end there only."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tools.delay_proxy import DelayProxy, wait_until

ROUND_TRIP_S = 0.004


@contextmanager
def through_a_proxy(round_trip_s: float = ROUND_TRIP_S) -> Iterator[tuple[DelayProxy, socket.socket, socket.socket]]:
    """A client and the server's end of its connection, with the proxy between them."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        DelayProxy(listener.getsockname()[:2], round_trip_s) as proxy,
        socket.create_connection(address_of(proxy), timeout=20) as client,
    ):
        listener.settimeout(20)
        server, _ = listener.accept()
        with server:
            server.settimeout(20)
            yield proxy, client, server


def address_of(proxy: DelayProxy) -> tuple[str, int]:
    host, _, port = proxy.address.rpartition(":")
    return host, int(port)


def read_to_end(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("round_trip_s", [0.0, ROUND_TRIP_S])
def test_both_directions_pass_every_byte_in_order(round_trip_s: float) -> None:
    there, back = (random.Random(seed).randbytes(3_000_000) for seed in (1, 2))
    with through_a_proxy(round_trip_s) as (_, client, server):

        def talk(connection: socket.socket, data: bytes) -> None:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)

        senders = [threading.Thread(target=talk, args=each) for each in ((client, there), (server, back))]
        received: dict[str, bytes] = {}
        reader = threading.Thread(target=lambda: received.update(client=read_to_end(client)))
        for thread in (*senders, reader):
            thread.start()
        received["server"] = read_to_end(server)
        for thread in (*senders, reader):
            thread.join()
    assert received == {"server": there, "client": back}


def test_a_shorter_delay_lets_nothing_overtake() -> None:
    with through_a_proxy(0.2) as (proxy, client, server):
        client.sendall(b"first ")
        # The first bytes are under way once something sent after them in the other direction has not overtaken them.
        server.sendall(b"x")
        assert client.recv(1) == b"x"
        proxy.set_round_trip(0.0)
        client.sendall(b"second")
        client.shutdown(socket.SHUT_WR)
        assert read_to_end(server) == b"first second"


def test_half_a_close_leaves_the_other_direction_open() -> None:
    with through_a_proxy() as (_, client, server):
        client.sendall(b"question")
        client.shutdown(socket.SHUT_WR)
        assert read_to_end(server) == b"question"
        server.sendall(b"answer")
        server.shutdown(socket.SHUT_WR)
        assert read_to_end(client) == b"answer"


def test_a_server_that_closes_is_seen_to_close() -> None:
    with through_a_proxy() as (_, client, server):
        server.sendall(b"bye")
        server.close()
        assert read_to_end(client) == b"bye"


def test_an_upstream_that_is_not_there_is_a_closed_connection() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with DelayProxy(unused.getsockname()[:2]) as proxy, socket.create_connection(address_of(proxy)) as client:
            client.settimeout(20)
            assert client.recv(1) == b""


def test_a_closed_proxy_ends_its_connections_and_leaves_no_thread() -> None:
    before = threading.active_count()
    with through_a_proxy() as (proxy, client, server):
        client.sendall(b"hello")
        assert server.recv(5) == b"hello"
        proxy.__exit__()
        assert client.recv(1) == b""
        assert server.recv(1) == b""
        assert threading.active_count() == before
        # Leaving the block closes it once more, which does nothing.


def test_waiting_never_ends_early() -> None:
    for wait_s in (-1.0, 0.0, 0.00005, 0.003):
        due_s = time.perf_counter() + wait_s
        wait_until(due_s)
        assert time.perf_counter() >= due_s
