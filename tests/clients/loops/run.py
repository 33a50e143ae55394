"""What every agent gets and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

INSTRUCTIONS = "Be brief."
LONG = 400


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of an agent, from a question to its answer.

    Attributes:
        served: The model.
        tools: The functions that it may call.
        streamed: Whether answers come in pieces.
        speculation: Whether tokens are drafted.
        question: What it is asked.
        history: The conversation before, as JSON that an earlier run gave; empty: there is none.
        max_tokens: Longest answer.
        answer_type: A pydantic model that the answer has to fit; None: it is text.
    """

    served: Any
    tools: Any
    streamed: bool
    speculation: bool
    question: str
    history: str = ""
    max_tokens: int = LONG
    answer_type: Any = None

    @property
    def more(self) -> dict[str, Any]:
        """Fields of a request that clients do not know."""
        return {"speculation": {"enabled": self.speculation}, "temperature": 0}


@dataclass(frozen=True, kw_only=True)
class Turn:
    """How a run ended.

    Attributes:
        answer: The last text.
        history: The conversation as JSON, from which another process can go on.
    """

    answer: str
    history: str


Agent = Callable[[Run], Turn]
