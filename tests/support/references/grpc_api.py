"""Services, messages and fields of the gRPC protocol with their comments, as docs/grpc-api.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.references.tables import WRITTEN_BY, code, table

PROTOS = Path(__file__).resolve().parents[3] / "protos" / "paceline" / "rpc" / "v1"
# Clients need the first, the tiers among themselves the others.
FILES = ("gateway.proto", "verifier.proto", "drafter.proto", "common.proto")
HEAD = f"""# The gRPC API

Package `paceline.rpc.v1`, from `protos/paceline/rpc/v1`. {WRITTEN_BY}

* Clients call `Gateway` at a gateway's `--grpc-port`. The tiers call `Verifier` and `Drafter` of each other.
* Every service answers `grpc.health.v1.Health` and server reflection.
* Errors carry a status code and a message that names the field and the limit. `RESOURCE_EXHAUSTED` says when to
  retry.
* Token ids are those of the target's vocabulary. Names end in their unit: `_ns` is nanoseconds.
"""
_BLOCK = re.compile(r"(service|message|enum|oneof) (\w+) \{(\})?")
_CALL = re.compile(r"rpc (\w+)\((stream )?(\w+)\) returns \((stream )?(\w+)\);")
_FIELD = re.compile(r"(?:(optional|repeated) )?(\w+) (\w+) = (\d+);")
_VALUE = re.compile(r"(\w+) = (\d+);")


@dataclass(slots=True)
class Block:
    """A service, message or enum of a file, with the rows of its table."""

    kind: str
    name: str
    said: str
    rows: list[tuple[str, ...]] = field(default_factory=list)


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_section(name) for name in FILES)


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a .proto file, in its order.

    Raises:
        ValueError: A line that is none of what our files hold.
    """
    said: list[str] = []
    block: Block | None = None
    choice = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("//"):
            said.append(line.removeprefix("//").strip())
            continue
        comment, said = " ".join(said), []
        if (found := _BLOCK.fullmatch(line)) and found[1] == "oneof":
            choice = found[2]
        elif found:
            block = Block(found[1], found[2], comment)
            if found[3]:
                yield block
        elif line == "}" and choice:
            choice = ""
        elif line == "}" and block:
            yield block
        elif block and line and not line.startswith("reserved "):
            block.rows.append(_row(line, comment, choice))


def _row(line: str, said: str, choice: str) -> tuple[str, ...]:
    if call := _CALL.fullmatch(line):
        taken, given = (
            f"{'stream of ' if each[0] else ''}{_linked(each[1])}" for each in (call.group(2, 3), call.group(4, 5))
        )
        return code(call[1]), taken, given, said
    if found := _FIELD.fullmatch(line):
        label = f"one of {choice}" if choice else found[1] or ""
        return code(found[3]), found[4], f"{label} {_linked(found[2])}".strip(), said
    if value := _VALUE.fullmatch(line):
        return code(value[1]), value[2], said
    raise ValueError(f"what is this line of a .proto file: {line!r}")


def _linked(type_name: str) -> str:
    return f"[{type_name}](#{type_name.lower()})" if type_name[0].isupper() else type_name


def _section(name: str) -> str:
    heads = {
        "service": ("call", "takes", "answers", "what it does"),
        "message": ("field", "number", "type", "meaning"),
        "enum": ("value", "number", "meaning"),
    }
    parts = [f"\n## {name}\n"]
    for block in blocks((PROTOS / name).read_text(encoding="utf-8")):
        title = f"service {block.name}" if block.kind == "service" else block.name
        parts.append(f"\n### {title}\n\n{block.said}\n")
        if block.rows:
            parts.append("\n" + table(heads[block.kind], block.rows))
    return "".join(parts)
