"""An answer as Anthropic's API tells it."""

from __future__ import annotations

import json

import pytest

from paceline.core.messages import FinishReason
from paceline.gateway.api.anthropic.answer import MessageAnswer
from paceline.gateway.message.growing import Message
from paceline.gateway.message.parts import CallArguments, CallBegin
from paceline.gateway.sessions.output import Ending


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": 1e999}', '{"a": 1', "[1]"])
def test_arguments_that_are_no_object_of_json_leave_the_answer_one(arguments: str) -> None:
    message = Message(None, "session")
    answer = MessageAnswer("msg_1", "m", 3, message)
    answer.further(message.take([CallBegin("f"), CallArguments(arguments)]))
    answer.ending(Ending(finish_reason=FinishReason.STOP, num_prompt_tokens=3, num_generated_tokens=1))
    [block] = answer.whole()["content"]
    assert block["input"] == {"INVALID_JSON": arguments}
    assert json.dumps(answer.whole(), allow_nan=False)
