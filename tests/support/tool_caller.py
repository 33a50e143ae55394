"""A checkpoint that reasons, and calls tools when it is asked to."""

from __future__ import annotations

from pathlib import Path

from tests.support.scripted_checkpoint import save_scripted

CALL = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
WEATHER = CALL.format(name="get_weather", arguments='{"city": "Paris"}')
ADD = CALL.format(name="add", arguments='{"a": 20, "b": 1}')
# Sampled where a request is silent, and so narrowly that it says what it is to say.
SAMPLING = {"do_sample": True, "temperature": 0.625, "top_p": 0.75, "top_k": 20}
# By the token that ends a prompt.
SAID = {
    "<|first|>": f"<think>\nWhat is the weather?\n</think>\n\n{WEATHER}",
    "<|second|>": f"<think>\nOne degree warmer.\n</think>\n\n{ADD}",
    "<|both|>": f"<think>\nBoth at once.\n</think>\n\nLet me see.\n{WEATHER}\n{ADD}",
    "<|last|>": "<think>\nI know it now.\n</think>\n\nTomorrow it will be 21 degrees in Paris.",
}
# A user who says "both" gets two calls in one turn, others one after another; after two results comes the answer.
TEMPLATE = """{{ bos_token }}
{%- if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- set seen = namespace(results=0, both=false) %}
{%- for message in messages %}<|{{ 'user' if message.role == 'tool' else message.role }}|>
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- if message.role == 'tool' %}{% set seen.results = seen.results + 1 %}{% endif %}
{%- if message.role == 'user' and 'both' in message.content %}{% set seen.both = true %}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>
{%- if not tools or seen.results > 1 %}<|last|>
{%- elif seen.both %}<|both|>
{%- elif seen.results %}<|second|>
{%- else %}<|first|>{% endif %}{% endif %}"""


def save_tool_caller(folder: Path, tokenizer_of: Path) -> None:
    """Writes the checkpoint, with the tokenizer of another one."""
    save_scripted(folder, tokenizer_of, TEMPLATE, SAID, sampling=SAMPLING)
