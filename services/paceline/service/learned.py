"""Tuned state, what is learned of step times and drafts, in a file: a successor starts where its predecessor ended.

There is a file for each machine, model and set of flags that step times depend on. It affects speed, never a token.
A missing or broken file, or one of another release, is ignored.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import platform
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline import __version__
from paceline.service.config import named
from paceline.user_cache import NothingWritableError, make_private, user_cache

logger = logging.getLogger(__name__)

# Pause between two writes.
SAVE_S = 60.0
# A folder's name.
KEEP_NOTHING = "none"

# Values of JSON.
Learned = Mapping[str, Any]


class Learner(Protocol):
    """An object that learns."""

    def learned(self) -> Learned:
        """Returns what a successor may start with."""
        ...

    def resume(self, learned: Learned) -> None:
        """Starts where a predecessor ended; broken content raises any error."""
        ...


@dataclass(frozen=True, slots=True)
class TunedState:
    """The file of what a verifier has learned, JSON; without a path nothing is kept.

    Attributes:
        kind: Names everything that the content depends on.
    """

    path: Path | None
    kind: str = ""

    def load_into(self, learner: Learner) -> None:
        """Lets a learner start with the content, if it exists and is usable."""
        if self.path is None:
            return
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("what was learned cannot be read", extra={"path": str(self.path), "error": str(error)})
            return
        resume(learner, content, str(self.path))

    async def keep(self, learned: Callable[[], Learned]) -> None:
        """Writes what is learned every minute, and at the end."""
        try:
            while True:
                await asyncio.sleep(SAVE_S)
                await asyncio.to_thread(self.write, learned())
        finally:
            self.write(learned())

    def write(self, learned: Learned) -> None:
        """Writes atomically: a reader sees the old content or the new one."""
        if self.path is None:
            return
        path = self.path
        # The loop's thread writes at the end, others before.
        beside = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        try:
            make_private(path.parent)
            beside.write_text(json.dumps(learned), encoding="utf-8")
            beside.replace(path)
        except OSError as error:
            logger.warning("what was learned cannot be kept", extra={"path": str(path), "error": str(error)})


NO_STATE = TunedState(None)


@contextmanager
def learning(forget: Callable[[], None]) -> Iterator[None]:
    """An error in learning from a step costs what was learned, and never the step.

    Args:
        forget: Begins anew.
    """
    try:
        yield
    except Exception:
        logger.exception("learning from a step failed; what was learned is forgotten")
        forget()


def resume(learner: Learner, content: bytes, origin: str) -> None:
    """Lets a learner start with JSON of a predecessor's or another's, if it is usable.

    Args:
        origin: Where that comes from, for the log.
    """
    before = learner.learned()
    try:
        learner.resume(json.loads(content))
    # Nothing that it may hold is worth a start: deep nesting, numbers beyond any float, and what else there is.
    except Exception as error:  # noqa: BLE001
        learner.resume(before)
        logger.warning("what was learned cannot be used", extra={"origin": origin, "error": repr(error)})
    else:
        logger.info("begins with what was learned", extra={"origin": origin})


def kept_in(learned_dir: str, environ: Mapping[str, str], *facts: Any) -> TunedState:
    """Returns the file of a learner on this machine.

    Args:
        learned_dir: The folder; empty: paceline/learned in the user's cache; `KEEP_NOTHING`: nothing is kept.
        environ: Environment variables; XDG_CACHE_HOME says where caches are.
        facts: Everything else that the content depends on.
    """
    kind = hashlib.sha256(repr((__version__, _machine(), *facts)).encode()).hexdigest()[:16]
    folder = _folder(learned_dir, environ)
    return TunedState(None if folder is None else folder / f"{kind}.json", kind)


def _folder(learned_dir: str, environ: Mapping[str, str]) -> Path | None:
    if learned_dir == KEEP_NOTHING:
        return None
    if learned_dir:
        with named("--learned-dir", learned_dir):
            return Path(learned_dir).expanduser()
    try:
        return user_cache(environ) / "learned"
    except NothingWritableError as error:
        logger.warning("what is learned is not kept: %s", error)
        return None


def _machine() -> str:
    """Names the kind of processor, since step times of another kind would mislead."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.processor()} x {os.cpu_count()}"
