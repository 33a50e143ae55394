"""Has the bodies of HTTP requests read and understood: within bounds, and off the event loop where that takes long.

It knows no endpoint.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from prometheus_client import Counter
from starlette.requests import Request

from paceline.core.errors import PacelineError
from paceline.gateway.access.callers import current_caller
from paceline.gateway.access.fair_shares import Shares
from paceline.gateway.api.endpoints.workers import Workers
from paceline.gateway.http.body import parse_json_object, read_body
from paceline.gateway.http.fields import UnknownFields
from paceline.gateway.http.response import IGNORED_FIELDS, Exchange
from paceline.gateway.message.tools import MAX_TOOLS
from paceline.obs.families import Family

# Larger bodies are read in a thread, so that no stream waits for a tokenizer.
MAX_INLINE_BYTES = 4 * 1024
# Those that may ask for a grammar, as tools do that are strict.
_GRAMMAR_FIELDS = frozenset(
    {
        "output_config",
        "text",
        "tool_choice",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
    }
)

ReadT = TypeVar("ReadT")


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyReader:
    """Reads request bodies.

    Attributes:
        max_bytes: Largest body accepted.
        timeout_s: Time for all of it, in seconds.
        reading: Bytes of all bodies that are read at the moment, at either door.
        workers: Understand large ones.
        grammar_workers: Understand those with grammars, for which nobody else should have to wait.
        strict_fields: Whether unknown fields are refused instead of ignored.
        ignored_fields: Counts those that were ignored.
    """

    max_bytes: int
    timeout_s: float
    reading: Shares
    workers: Workers
    grammar_workers: Workers
    strict_fields: bool
    ignored_fields: Family[Counter]

    async def read(
        self,
        request: Request,
        exchange: Exchange,
        understand: Callable[..., ReadT],
        prepare: Callable[[dict[str, Any]], Awaitable[Any]] | None = None,
    ) -> ReadT:
        """Returns what `understand` makes of a body; the answer will name the fields that it does not know.

        Args:
            request: Whose body it is.
            exchange: Its answer.
            understand: Takes the JSON object and the fields that nobody knows.
            prepare: Fetches what `understand` takes before these; None: it needs nothing else.

        Raises:
            InvalidRequestError: The body is too large, too slow or no JSON object, or is refused by `understand`.
            OverloadedError: There is no room to read it.
        """
        unknown = UnknownFields(strict=self.strict_fields)
        with self.reading.take(0, current_caller()) as held:
            raw = await read_body(
                request.stream(),
                request.headers.get("content-length"),
                held.resize,
                max_bytes=self.max_bytes,
                timeout_s=self.timeout_s,
            )
            try:
                understood = await self._understood(raw, understand, unknown, prepare)
            except PacelineError:
                self._tell(unknown, exchange)
                raise
            self._tell(unknown, exchange)
            return understood

    async def _understood(
        self,
        raw: bytearray,
        understand: Callable[..., ReadT],
        unknown: UnknownFields,
        prepare: Callable[[dict[str, Any]], Awaitable[Any]] | None,
    ) -> ReadT:
        small = len(raw) <= MAX_INLINE_BYTES
        fields = parse_json_object(raw) if small else await self.workers.run(partial(parse_json_object, raw))
        if prepare is not None:
            prepared = await prepare(fields)
            # What was fetched may be long.
            small &= not prepared
            understand = partial(understand, prepared)
        work = partial(understand, fields, unknown)
        if asks_for_grammar(fields):
            return await self.grammar_workers.run(work)
        return work() if small else await self.workers.run(work)

    def _tell(self, unknown: UnknownFields, exchange: Exchange) -> None:
        """Names and counts what was ignored; not while a thread may still be at it, after a cancellation."""
        if not unknown.counts:
            return
        exchange.headers[IGNORED_FIELDS] = unknown.header
        for label, count in unknown.counts.items():
            self.ignored_fields.labels(label).inc(count)


def asks_for_grammar(fields: Mapping[str, Any]) -> bool:
    """Tells whether a body of any API may ask for a grammar, which takes up to a second to compile."""
    tools = fields.get("tools")
    given = tools[:MAX_TOOLS] if isinstance(tools, list) else ()
    return not _GRAMMAR_FIELDS.isdisjoint(fields) or any(map(_is_strict, given))


def _is_strict(tool: Any) -> bool:
    inner = tool.get("function") if isinstance(tool, dict) else None
    return any(isinstance(each, dict) and bool(each.get("strict")) for each in (tool, inner))
