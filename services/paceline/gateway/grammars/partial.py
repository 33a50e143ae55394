"""Grammars that bind the part of an answer that follows free text, such as its reasoning.

Free text ends with a marker, which is spelled in text or is one added token; it holds no other added tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.gateway.grammars.formats import checked
from paceline.gateway.message.form import THINK_TAGS, begins_thinking

Json = dict[str, Any]
# Id of an added token by its spelling; None: there is none.
TokenOf = Callable[[str], int | None]
_ANSWER = "answer"
_GAP = r"GAP: /[ \n]*/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The text before the bound part.

    Attributes:
        reasoning: Family of the model's reasoning; empty: it has none.
        prompt_end: The end of the prompt, special tokens spelled out.
        token_of: Finds added tokens.
    """

    reasoning: str
    prompt_end: str
    token_of: TokenOf

    @property
    def may_reason(self) -> bool:
        """Whether the answer is within reasoning, or may begin it."""
        tags = THINK_TAGS.get(self.reasoning)
        return tags is not None and not self.prompt_end.rstrip().endswith(tags[0][1])

    def rules(self, part: str, call: str = "") -> list[str]:
        """Returns rules from `start` to the bound part.

        Args:
            call: Marker with which a call may begin in the midst of reasoning, which it ends; the rule `begun` goes
                on from there. Empty: none may.
        """
        if not self.may_reason:
            return [f"start: {part}", _GAP]
        begin, end = THINK_TAGS[self.reasoning][0]
        within = begins_thinking(self.reasoning, self.prompt_end)
        ends = [f"to_thought GAP {part}", *(["to_call_in_thought begun"] if call else [])]
        begun = [f"start: {' | '.join(ends)}"]
        maybe = [f"start: {part} | GAP thinking ({' | '.join(ends)})", self.marker("thinking", begin)]
        called = [
            self._up_to_token("to_call_in_thought", "call_in_thought", "WITHOUT_THOUGHT", call),
            up_to("call_in_thought", call),
        ]
        thought = self.text_up_to("thought", end, *([call] if call else []))
        return [*(begun if within else maybe), _GAP, *thought, *(called if call else [])]

    def marker(self, name: str, text: str) -> str:
        token_id = self.token_of(text)
        return f"{name}: {json.dumps(text)}" + ("" if token_id is None else f" | <[{token_id}]>")

    def text_up_to(self, name: str, marker: str, *others: str) -> Iterator[str]:
        """Yields the rules of free text with its marker, `to_NAME`, and of text without it, `WITHOUT_NAME`.

        Args:
            name: Name of the rules.
            others: Further markers that text without the marker must not hold.
        """
        without = f"WITHOUT_{name.upper()}"
        yield self._up_to_token(f"to_{name}", f"{name}_spelled", without, marker)
        yield up_to(f"{name}_spelled", marker)
        yield rf"{without}: /(.|\n)*/ & ~/(.|\n)*({'|'.join(map(pattern, (marker, *others)))})(.|\n)*/"

    def _up_to_token(self, name: str, spelled: str, without: str, marker: str) -> str:
        token_id = self.token_of(marker)
        return f"{name}: {spelled}" + ("" if token_id is None else f" | {without} <[{token_id}]>")


def up_to(name: str, ending: str) -> str:
    """Returns the rule of free text that ends where these characters first end."""
    return rf"{name}[lazy]: /(.|\n)*{pattern(ending)}/"


def pattern(text: str) -> str:
    """Returns a regular expression of Lark that matches a text."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")


def after_reasoning(grammar: str, opening: Opening, *, field: str) -> str:
    """Returns a grammar that binds what follows the reasoning of an answer.

    Args:
        grammar: As sessions carry it.
        opening: The beginning of the answer.
        field: Name of the request field, for the error.

    Raises:
        InvalidRequestError: The two together are too large.
    """
    if not opening.may_reason:
        return grammar
    return joined(opening.rules(f"@{_ANSWER}"), named(grammar, _ANSWER), field)


def named(grammar: str, name: str) -> list[Json]:
    """Returns a grammar, as sessions carry it, as one that rules refer to by a name, with those that it refers to."""
    given = json.loads(grammar) if grammar.lstrip().startswith("{") else {"grammars": [{"lark_grammar": grammar}]}
    first, *others = given["grammars"]
    return [{**first, "name": name}, *others]


def joined(rules: Sequence[str], others: Sequence[Json], field: str) -> str:
    """Returns one grammar of rules and of the grammars that they name."""
    return checked(json.dumps({"grammars": [{"lark_grammar": "\n".join(rules) + "\n"}, *others]}), field)
