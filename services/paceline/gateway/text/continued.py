"""Renders a chat so that its last message can be gone on with: nothing of the template follows its text.

The text is marked at its end before the template is rendered, and the prompt cut there afterwards. transformers goes
about it in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.errors import InvalidRequestError

# Characters that mean nothing to any text, and a space that tells whether the template trims texts.
_MARK = "\ufdd4end-of-text\ufdd5"
_MARK_AND_SPACE = f"{_MARK} "


def with_end_marked(messages: Sequence[Mapping[str, Any]], field: str) -> list[Mapping[str, Any]]:
    """Returns the messages of a chat, the text of the last with a mark at its end.

    Raises:
        InvalidRequestError: The last message has no text.
    """
    *before, last = messages
    if not isinstance(last.get("content"), str) or not last["content"]:
        raise InvalidRequestError(f"{field}[{len(before)}].content", "must be a text, as continue_final_message is set")
    return [*before, {**last, "content": last["content"] + _MARK_AND_SPACE}]


def up_to_mark(rendered: str) -> str:
    """Returns a rendered chat up to the end of its last message's text.

    Raises:
        InvalidRequestError: The template does not render that text.
    """
    end = rendered.rfind(_MARK)
    if end < 0:
        raise InvalidRequestError("continue_final_message", "the chat template does not render the last message")
    cut = rendered[:end]
    return cut if rendered.startswith(_MARK_AND_SPACE, end) else cut.rstrip()
