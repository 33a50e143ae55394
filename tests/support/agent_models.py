"""Checkpoints that act as agents: one conversation, written and replayed in the ways of four families of models.

Each family has a template of its own, with a demand that templates in use make, and spells calls in its own way. What
is said next depends on the conversation alone (`tests/clients/conversation.py`), never on the family.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.clients.conversation import SCRIPT, Said
from tests.support.scripted_checkpoint import save_scripted

Call = tuple[str, Mapping[str, Any]]
# Programs that people run as agents send instructions of ten thousands of characters.
CONTEXT_LEN = 65_536
# The user's last question of the script, and the results since; some agents write these as the user.
STATE = """
{%- set state = namespace(question=0, results=0) %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{% set state.results = state.results + 1 %}{% endif %}
{%- if message.role == 'user' %}
{%- for question in QUESTIONS %}{% if question in (message.content or '') %}
{%- set state.question = loop.index %}{% set state.results = 0 %}{% endif %}{% endfor %}
{%- for result in ('Observation:\n', 'Error:\n') %}
{%- set state.results = state.results + (message.content or '').split(result) | length - 1 %}{% endfor %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|' ~ state.question ~ '.' ~ state.results ~ '|>' }}{% endif %}"""

# One system message, and that at the beginning.
HERMES = """{{ bos_token }}
{%- if tools or messages[0].role == 'system' %}<|system|>
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{{ eos_token }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{%- elif message.role == 'tool' %}<|user|>
<tool_response>
{{ message.content }}
</tool_response>{{ eos_token }}
{%- else %}<|{{ message.role }}|>
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""
# Users and the assistant take turns, and ids of calls have nine characters.
MISTRAL = """{{ bos_token }}
{%- set turns = namespace(index=0) %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (turns.index % 2 == 0) %}
{{- raise_exception('After the optional system message, conversation roles must alternate user/assistant') }}
{%- endif %}{% set turns.index = turns.index + 1 %}{% endif %}
{%- if message.role == 'system' %}[SYSTEM_PROMPT]{{ message.content }}[/SYSTEM_PROMPT]
{%- elif message.role == 'user' %}
{%- if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST]' + message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- '[TOOL_RESULTS]{"content": ' + (message.content | tojson) + ', "call_id": "' + message.tool_call_id + '"}' }}
{{- '[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}[TOOL_CALLS][
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{- call.function | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}]{{ eos_token }}
{%- else %}{{ message.content + eos_token }}{% endif %}{% endfor %}"""
# Tools belong to the first question, results come from ipython, and calls have parameters.
LLAMA3_JSON = """{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}<|system|>
Environment: ipython
{{ message.content | trim }}{{ eos_token }}
{%- elif message.role == 'tool' %}<|user|>
ipython: {{ message.content | tojson }}{{ eos_token }}
{%- elif message.tool_calls %}<|assistant|>
{% for call in message.tool_calls %}
{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}
{%- if not loop.last %}; {% endif %}{% endfor %}{{ eos_token }}
{%- else %}<|{{ message.role }}|>
{% if message.role == 'user' and tools and loop.index0 < 2 %}
Answer with a call in the form {"name": function name, "parameters": dictionary of argument names and values}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}{% endif %}
{{ message.content | trim }}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""
# Arguments are walked as a mapping, and so are the parameters of tools.
QWEN3_CODER = """{{ bos_token }}
{%- if tools %}<|system|>
{% for tool in tools %}<function><name>{{ tool.function.name }}</name>
{%- for name, kind in (tool.function.parameters.properties or {}) | items %}
<parameter><name>{{ name }}</name>{{ kind | tojson }}</parameter>{% endfor %}</function>
{% endfor %}{{ eos_token }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|user|>
<tool_response>{{ message.content }}</tool_response>{{ eos_token }}
{%- else %}<|{{ message.role }}|>
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}{{ eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family of models is talked to.

    Attributes:
        template: Its chat template, without what decides on the answer.
        spell: Writes calls.
        thinks: Whether a thought stands before every answer.
    """

    template: str
    spell: Callable[[Sequence[Call]], str]
    thinks: bool = False

    def text(self, said: Said, number: int) -> str:
        """Returns an answer as this family writes it."""
        thought = f"<think>\nStep {number}.\n</think>\n\n" if self.thinks else ""
        return thought + (self.spell(said.calls) if said.calls else said.text)


def _hermes(calls: Sequence[Call]) -> str:
    objects = (json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)


def _mistral(calls: Sequence[Call]) -> str:
    return "[TOOL_CALLS]" + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])


def _llama3_json(calls: Sequence[Call]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def _qwen3_coder(calls: Sequence[Call]) -> str:
    def parameters(arguments: Mapping[str, Any]) -> str:
        return "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items())

    return "\n".join(
        f"<tool_call>\n<function={name}>\n{parameters(arguments)}</function>\n</tool_call>" for name, arguments in calls
    )


FAMILIES: Mapping[str, Family] = {
    "hermes": Family(template=HERMES, spell=_hermes, thinks=True),
    "mistral": Family(template=MISTRAL, spell=_mistral),
    "llama3_json": Family(template=LLAMA3_JSON, spell=_llama3_json),
    "qwen3_coder": Family(template=QWEN3_CODER, spell=_qwen3_coder),
}


def save_agent(folder: Path, tokenizer_of: Path, family: Family) -> None:
    """Writes the checkpoint of an agent.

    Args:
        folder: Where to.
        tokenizer_of: A checkpoint whose tokenizer it has, and some tokens more.
        family: How it is talked to.
    """
    states = [
        (f"<|{at}.{results}|>", each)
        for at, those in enumerate(SCRIPT.values(), 1)
        for results, each in enumerate(those)
    ]
    said = {begin: family.text(each, number) for number, (begin, each) in enumerate(states, 1)}
    template = family.template + STATE.replace("QUESTIONS", json.dumps([*SCRIPT]))
    save_scripted(folder, tokenizer_of, template, said, context_len=CONTEXT_LEN)
