"""A TCP proxy that adds a round trip, for benches and tests: threads, because sleeps of an event loop are too coarse.

Each direction of a connection has a reader, which stamps what it receives with the time it is due, and a writer, which
sleeps until then. So order is kept, and a delay slows nothing down but the message itself. The proxy can also cut
connections, or hold everything back without closing them. It does not look at the bytes.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Self

CHUNK_BYTES = 256 * 1024
# Chunks under way in one direction; beyond that the sender is held back, as by a full window.
MAX_CHUNKS = 4096
# The kernel may wake a sleeper this much too late, so the last part of a wait spins.
SPIN_S = 0.0001
CONNECT_TIMEOUT_S = 5.0

# Bytes to pass on, and when; no bytes: the sender has ended its direction.
_Chunk = tuple[float, bytes]


def wait_until(due_s: float) -> None:
    """Returns when `time.perf_counter` reaches `due_s`, at most microseconds late as far as the machine allows."""
    left_s = due_s - time.perf_counter()
    if left_s > SPIN_S:
        time.sleep(left_s - SPIN_S)
    while time.perf_counter() < due_s:
        pass


class DelayProxy:
    """Listens on a free port of this machine and passes connections on; a context manager that ends them all.

    Args:
        upstream: Host and port that each connection goes on to.
        round_trip_s: Delay of both directions together.
    """

    def __init__(self, upstream: tuple[str, int], round_trip_s: float = 0.0) -> None:
        self._upstream = upstream
        self._delay_s = round_trip_s / 2
        self._connections: list[_Connection] = []
        self._lock = threading.Lock()
        self._closed = False
        self._flowing = threading.Event()
        self._flowing.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._acceptor = threading.Thread(target=self._accept, name="proxy", daemon=True)

    @property
    def address(self) -> str:
        """Where it listens, `host:port`."""
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def set_round_trip(self, round_trip_s: float) -> None:
        """Changes the delay, for open connections too; bytes under way arrive when they were due, and in order."""
        self._delay_s = round_trip_s / 2

    def set_upstream(self, upstream: tuple[str, int]) -> None:
        """Lets later connections go on to another address, and ends those to the former one."""
        self._upstream = upstream
        self.cut()

    def cut(self) -> None:
        """Ends all open connections; new ones are taken."""
        for connection in self._connections:
            connection.abort()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lets nothing pass while a block runs: connections stay open, and later ones are taken."""
        self._flowing.clear()
        try:
            yield
        finally:
            self._flowing.set()

    def __enter__(self) -> Self:
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
        # Closing a listener does not wake the thread that waits in accept().
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        self._flowing.set()
        for connection in self._connections:
            connection.abort()
            connection.join()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._upstream, timeout=CONNECT_TIMEOUT_S)
            except OSError:
                near.close()
                continue
            with self._lock:
                if self._closed:
                    near.close()
                    far.close()
                    return
                self._connections = [each for each in self._connections if not each.ended]
                self._connections.append(_Connection(near, far, lambda: self._delay_s, self._flowing))


class _Connection:
    """A client, its connection to the upstream, and the four threads between them."""

    def __init__(
        self, near: socket.socket, far: socket.socket, delay: Callable[[], float], flowing: threading.Event
    ) -> None:
        self._sockets = (near, far)
        self._delay = delay
        self._flowing = flowing
        for each in self._sockets:
            each.settimeout(None)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._keeper = threading.Thread(target=self._run, name="proxy connection", daemon=True)
        self._keeper.start()

    @property
    def ended(self) -> bool:
        """Whether both directions have ended."""
        return not self._keeper.is_alive()

    def abort(self) -> None:
        """Ends both directions; both sides see the end of the stream."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Waits until both directions have ended."""
        self._keeper.join()

    def _run(self) -> None:
        near, far = self._sockets
        threads = [thread for pair in ((near, far), (far, near)) for thread in self._direction(*pair)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def _direction(self, source: socket.socket, sink: socket.socket) -> tuple[threading.Thread, threading.Thread]:
        chunks: queue.Queue[_Chunk] = queue.Queue(MAX_CHUNKS)
        return (
            threading.Thread(target=self._read, args=(source, chunks), name="proxy reader", daemon=True),
            threading.Thread(target=self._write, args=(chunks, sink), name="proxy writer", daemon=True),
        )

    def _read(self, source: socket.socket, chunks: queue.Queue[_Chunk]) -> None:
        data = b"?"
        while data:
            try:
                data = source.recv(CHUNK_BYTES)
            except OSError:
                # A reset ends both directions, an orderly end only its own.
                self.abort()
                data = b""
            chunks.put((time.perf_counter() + self._delay(), data))

    def _write(self, chunks: queue.Queue[_Chunk], sink: socket.socket) -> None:
        while True:
            due_s, data = chunks.get()
            wait_until(due_s)
            self._flowing.wait()
            try:
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
            except OSError:
                self.abort()
                # The reader may wait for a place in the queue; its end marker comes last.
                while data:
                    _, data = chunks.get()
                return
