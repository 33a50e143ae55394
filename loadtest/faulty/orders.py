"""How a bench orders a process to go wrong for a while: a datagram to a socket of the process, named after its replica.

A process that dies takes its orders with it; the next one of that name begins well.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

# Names the folder of the sockets and of the file of deaths.
FOLDER_VARIABLE = "LOADTEST_ORDERS"
DEATHS_FILE = "deaths"
MAX_ORDER_BYTES = 1024

HANG = "hang"
INTERNAL = "internal"
GARBAGE = "garbage"
NONSENSE = "nonsense"
GAP = "gap"
HALF = "half"
FLOOD = "flood"
CLOCK = "clock"
# How far it jumps.
JUMP_S = 3600.0
# A prompt with such a row of tokens, which no text has, ends every engine that computes it, without an order.
POISON = {"raise": (2, 2, 2, 2), "abort": (3, 3, 3, 3)}


class Orders:
    """Orders of a process, and until when; safe from any thread."""

    def __init__(self) -> None:
        self._until_s: Mapping[str, float] = {}

    def take(self, kind: str, seconds: float) -> None:
        """Takes an order in."""
        self._until_s = {**self._until_s, kind: time.monotonic() + seconds}

    def holds(self, kind: str) -> bool:
        """Whether the process is to do so now."""
        return time.monotonic() < self._until_s.get(kind, 0.0)


def obey(argv: Sequence[str]) -> Orders:
    """Takes orders for the replica that a command line names, from now on; the wall clock jumps if ordered to."""
    orders = Orders()
    inbox = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    path = _path(Path(os.environ[FOLDER_VARIABLE]), argv[argv.index("--replica-id") + 1])
    path.unlink(missing_ok=True)
    inbox.bind(str(path))
    threading.Thread(target=_listen, args=(inbox, orders), name="orders", daemon=True).start()
    _let_clock_jump(orders)
    return orders


def order(folder: Path, name: str, kind: str, seconds: float) -> None:
    """Orders a process to go wrong for some seconds; one that is not there does not get the order."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(OSError):
        sender.sendto(json.dumps([kind, seconds]).encode(), str(_path(folder, name)))


def note_death(kind: str) -> None:
    """Notes in a file that this process is about to die of a poisonous request."""
    with (Path(os.environ[FOLDER_VARIABLE]) / DEATHS_FILE).open("a", encoding="utf-8") as deaths:
        deaths.write(f"{kind} {os.getpid()}\n")


def num_deaths(folder: Path) -> int:
    """How many processes have died of poisonous requests so far."""
    with suppress(FileNotFoundError):
        return len((folder / DEATHS_FILE).read_text(encoding="utf-8").splitlines())
    return 0


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.sock"


def _listen(inbox: socket.socket, orders: Orders) -> None:
    while True:
        kind, seconds = json.loads(inbox.recv(MAX_ORDER_BYTES))
        sys.stderr.write(f"ordered to go wrong: {kind} for {seconds:g} s\n")
        orders.take(kind, seconds)


def _let_clock_jump(orders: Orders) -> None:
    """Wall clocks jump an hour ahead, and back; monotonic ones do not."""
    now, now_ns = time.time, time.time_ns

    def jump_s() -> float:
        return JUMP_S if orders.holds(CLOCK) else 0.0

    time.time = lambda: now() + jump_s()
    time.time_ns = lambda: now_ns() + int(jump_s() * 1e9)
