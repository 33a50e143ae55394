"""What the scripted agent model is asked and says: a text for every state of a conversation.

The state is the question that was asked last, and how many results of tools have come since. Tests know by it what a
client's loop has to end with, and `tests.support.agent_models` makes checkpoints of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One answer of the model: text, or calls of tools.

    Attributes:
        text: What it says.
        calls: Names and arguments of the tools that it calls.
    """

    text: str = ""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()


def _calls(*calls: tuple[str, Mapping[str, Any]]) -> Said:
    return Said(calls=calls)


_WEATHER = ("get_weather", {"city": "Paris"})
_ADD = ("add", {"a": 20, "b": 1})
_PLAN = ("update_plan", {"plan": ["read", "think", "write"]})

# One call after another; the second fails once and is made again.
WARM = "How warm will Paris be when it gets one degree warmer?"
WARM_ANSWER = "Tomorrow it will be 21 degrees in Paris."
WARM_CALLS = ["get_weather('Paris')", "add(20, 1)", "add(20, 1)"]
# A long answer, which may be cut.
WHY = "Why does it get warmer?"
WHY_ANSWER = (
    "Wind from the south brings mild air over the hills. Clouds keep the heat of the day, so that mornings begin where "
    "evenings ended. The nights are short in June, and the ground has stored what the sun gave it through May. After "
    "the rain on Monday all of this may change, for a cold front waits in the north."
)
# Two calls in one turn, or one after the other where a turn may have one only.
AGAIN = "Check both numbers, please."
AGAIN_ANSWER = "Both are right: 20 degrees today, 21 tomorrow."
AGAIN_CALLS = ["get_weather('Paris')", "add(20, 1)"]
# A call, and then an answer that a schema binds.
OBJECT = "Tell me of Paris as an object."
OBJECT_ANSWER = '{"city": "Paris", "degrees": 20}'
OBJECT_CALLS = ["get_weather('Paris')"]
# A long call, which may be cut; it is made twice.
PLAN = "Make a plan."
PLAN_ANSWER = "The plan is made."
# The same as WARM for agents whose every answer has to be a call, as a grammar spells them.
CALLS_ONLY = "How warm will Paris be, in calls alone?"
# And for agents that write code.
CODE = "How warm will Paris be, in code?"
# And for those that write it into an object.
CODE_OBJECT = "How warm will Paris be, in an object?"
_FINAL = f'final_answer("{WARM_ANSWER}")'
_CODE = ('print(get_weather(city="Paris"))', "print(add(a=20, b=1))", "print(add(a=20, b=1))", _FINAL)


def _enforced(name: str, arguments: Mapping[str, Any]) -> Said:
    return Said(text=json.dumps([{"name": name, "parameters": arguments}]))


def _code(code: str) -> Said:
    return Said(text=f"Thought: one step more.\n<code>\n{code}\n</code>")


def _code_object(code: str) -> Said:
    return Said(text=json.dumps({"thought": "one step more", "code": code}))


SCRIPT: Mapping[str, tuple[Said, ...]] = {
    WARM: (_calls(_WEATHER), _calls(_ADD), _calls(_ADD), Said(text=WARM_ANSWER)),
    WHY: (Said(text=WHY_ANSWER),),
    AGAIN: (_calls(_WEATHER, _ADD), _calls(_ADD), Said(text=AGAIN_ANSWER)),
    OBJECT: (_calls(_WEATHER), Said(text=OBJECT_ANSWER)),
    CALLS_ONLY: (
        *(_enforced(*call) for call in (_WEATHER, _ADD, _ADD)),
        _enforced("final_answer", {"answer": WARM_ANSWER}),
    ),
    CODE: tuple(map(_code, _CODE)),
    CODE_OBJECT: tuple(map(_code_object, _CODE)),
    PLAN: (_calls(_PLAN), _calls(_PLAN), Said(text=PLAN_ANSWER)),
}
