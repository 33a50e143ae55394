"""Makes sessions of a checked OpenAI body: one for each sample of each prompt.

It knows the request models and the tokenizer; it does no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.core.params import MAX_SEED, MAX_TOP_LOGPROBS, SamplingParams, SpeculationParams, check_priority
from paceline.gateway.api.openai.bodies import (
    TEMPLATE_NAMES,
    ChatBody,
    ChatFields,
    ChatMessage,
    CommonBody,
    CompletionBody,
    TextPart,
)
from paceline.gateway.api.openai.structured import grammar_of
from paceline.gateway.api.openai.tools import ToolCall, read_toolbox
from paceline.gateway.fleet.generation_config import MODEL_SAMPLING
from paceline.gateway.fleet.served_model import ServedModel
from paceline.gateway.grammars import calls as call_grammars
from paceline.gateway.grammars.compiling import grammar_of_json_schema
from paceline.gateway.grammars.partial import Opening, after_reasoning
from paceline.gateway.http.fields import UnknownFields, read_fields, read_text
from paceline.gateway.message.form import QWEN3_CODER, MessageForm, begins_thinking
from paceline.gateway.message.tools import Json, Toolbox
from paceline.gateway.sessions.request import (
    DEFAULT_MAX_TOKENS,
    MAX_CHOICES,
    MAX_TEMPLATE_CHARACTERS,
    SessionRequest,
    bad_word_tokens,
    check_judged,
    check_prompt,
    check_salt,
    check_stops,
    encode_text,
    new_seed,
    room_for_output,
    sample_seed,
    tokens_kept,
)
from paceline.gateway.text.chat_template import ChatTemplate

# Enough to see whether it ends within reasoning.
PROMPT_END_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    field: str
    token_ids: tuple[int, ...]


def completion_sessions(body: CompletionBody, model: ServedModel, request_id: str) -> list[SessionRequest]:
    """Returns the sessions of a text completion, samples of the same prompt side by side.

    Raises:
        InvalidRequestError: A field does not fit the model or the limits of the product.
    """
    given = _split_prompts(body.prompt)
    if len(given) * body.n > MAX_CHOICES:
        raise InvalidRequestError(
            "prompt" if len(given) > 1 else "n",
            f"{len(given)} prompts times n = {body.n} exceed the limit of {MAX_CHOICES} choices",
        )
    keep_last = tokens_kept(model, body.truncate_prompt_tokens, body.max_tokens)
    prompts = [_encode_prompt(model, field, value, keep_last) for field, value in given]
    prompt_only = body.max_tokens == 0 and (body.echo or body.prompt_logprobs is not None)
    sessions = _sessions(
        body,
        model,
        request_id,
        prompts,
        wanted=1 if prompt_only else body.max_tokens,
        wanted_field="max_tokens",
        unasked=DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        grammar=grammar_of(body),
        prompt_logprobs=body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs,
    )
    sessions = [replace(session, prompt_only=prompt_only) for session in sessions] if prompt_only else sessions
    if not body.echo:
        return sessions
    texts = [
        value if isinstance(value, str) and keep_last is None else _text_of(model, prompt, body.skip_special_tokens)
        for (_, value), prompt in zip(given, prompts, strict=True)
    ]
    return [replace(session, echo=texts[index // body.n]) for index, session in enumerate(sessions)]


def _text_of(model: ServedModel, prompt: _Prompt, skip_special_tokens: bool) -> str:
    return model.codec.decode(prompt.token_ids, special_tokens=not skip_special_tokens)


def chat_sessions(body: ChatBody, model: ServedModel, request_id: str, unknown: UnknownFields) -> list[SessionRequest]:
    """Returns the sessions of a chat completion, one a sample; `unknown` is told of fields of its messages.

    Raises:
        InvalidRequestError: A field does not fit the model or the limits of the product.
    """
    if body.n > MAX_CHOICES:
        raise InvalidRequestError("n", f"must be at most {MAX_CHOICES}, got {body.n}")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs", "is only allowed with logprobs: true")
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    top_logprobs = body.top_logprobs or 0
    if not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequestError("top_logprobs", f"must be from 0 to {MAX_TOP_LOGPROBS}, got {top_logprobs}")
    keep_last = tokens_kept(model, body.truncate_prompt_tokens, wanted)
    toolbox = read_toolbox(body.tools, body.tool_choice, body.parallel_tool_calls, unknown)
    token_ids = chat_tokens(body, model, unknown, keep_last, tools=toolbox.tools, extra=_effort(body))
    token_ids = check_prompt(model, token_ids, field="messages")
    # Calls that have to be made leave no room for content of another form.
    asked = "" if toolbox.enforced else grammar_of(body)
    prompt_end = _prompt_end(model, token_ids)
    return _sessions(
        body,
        model,
        request_id,
        [_Prompt(field="messages", token_ids=token_ids)],
        wanted=wanted,
        wanted_field=field,
        unasked=model.defaults.max_new_tokens,
        logprobs=top_logprobs if body.logprobs else None,
        grammar=_chat_grammar(asked, model, toolbox, prompt_end),
        form=_form(model, toolbox, prompt_end, bool(asked)),
        prompt_logprobs=body.prompt_logprobs,
    )


def _prompt_end(model: ServedModel, token_ids: Sequence[int]) -> str:
    """Returns the end of a prompt where it says whether the answer begins within reasoning."""
    return model.codec.decode(token_ids[-PROMPT_END_TOKENS:], special_tokens=True) if model.families.reasoning else ""


def _chat_grammar(asked: str, model: ServedModel, toolbox: Toolbox, prompt_end: str) -> str:
    """Returns the grammar of an answer; empty: none. May take up to a second.

    Args:
        asked: That of the content; empty: it has none.
        model: Whose the answer is.
        toolbox: Its tools.
        prompt_end: See `Opening`.
    """
    families = model.families
    opening = Opening(reasoning=families.reasoning, prompt_end=prompt_end, token_of=model.codec.added_token_id)
    if toolbox.enforced:
        asked = grammar_of_json_schema(toolbox.schema, field="tools", exact=False)
    if asked:
        return after_reasoning(asked, opening, field="tools" if toolbox.enforced else "response_format")
    if toolbox.bound and families.tool_calls in call_grammars.FAMILIES:
        return call_grammars.calls_amid_text(toolbox, families.tool_calls, opening)
    return ""


def _form(model: ServedModel, toolbox: Toolbox, prompt_end: str, bound: bool) -> MessageForm | None:
    """Returns how answers to a chat are read; None: all of them is content. One of a form of its own holds no calls."""
    reasoning = model.families.reasoning
    calls = model.families.tool_calls if toolbox.parsed and not toolbox.enforced and not bound else ""
    if not (reasoning or calls or toolbox.enforced):
        return None
    return MessageForm(
        reasoning=reasoning,
        thinks=begins_thinking(reasoning, prompt_end),
        tool_calls=calls,
        enforced=toolbox.enforced,
        named=toolbox.named,
        types=toolbox.types if calls == QWEN3_CODER else {},
    )


def _effort(body: ChatBody) -> dict[str, Any]:
    """Returns what a template is told of the effort; one that knows a switch only is switched off by `none`."""
    if body.reasoning_effort is None:
        return {}
    return {
        "reasoning_effort": body.reasoning_effort,
        **({"enable_thinking": False} if body.reasoning_effort == "none" else {}),
    }


def _sessions(
    body: CommonBody,
    model: ServedModel,
    request_id: str,
    prompts: Sequence[_Prompt],
    *,
    wanted: int | None,
    wanted_field: str,
    unasked: int | None,
    logprobs: int | None,
    grammar: str,
    form: MessageForm | None = None,
    prompt_logprobs: int | None,
) -> list[SessionRequest]:
    stops = check_stops(_stop_strings(body.stop))
    speculation = SpeculationParams(
        enabled=body.speculation.enabled,
        max_draft_tokens=body.speculation.max_draft_tokens,
        acceptance=body.speculation.acceptance,
        method=body.speculation.method,
    )
    bad_words = bad_word_tokens(model, body.bad_words)
    check_priority(body.priority)
    if prompt_logprobs is not None:
        num_tokens = body.n * sum(len(prompt.token_ids) for prompt in prompts)
        check_judged(num_tokens, prompt_logprobs, field="prompt_logprobs")
    sessions: list[SessionRequest] = []
    for prompt in prompts:
        max_tokens = room_for_output(model, len(prompt.token_ids), wanted, unasked=unasked, field=wanted_field)
        for seed in _seeds(body):
            sampling = _sampling(body, model, max_tokens, (logprobs, prompt_logprobs), seed, bad_words, grammar)
            sampling.check_vocabulary(model.identity.vocab_size, model.identity.eos_token_ids)
            sessions.append(
                SessionRequest(
                    model=model,
                    session_id=f"{request_id}-{len(sessions)}",
                    prompt_token_ids=prompt.token_ids,
                    sampling=sampling,
                    speculation=speculation,
                    stops=stops,
                    include_stop_str_in_output=body.include_stop_str_in_output,
                    skip_special_tokens=body.skip_special_tokens,
                    cache_salt=check_salt(body.cache_salt),
                    priority=body.priority,
                    return_token_ids=body.return_token_ids,
                    token_fates=body.speculation.token_fates,
                    whole=not body.stream and not stops,
                    form=form,
                )
            )
    return sessions


def _sampling(
    body: CommonBody,
    model: ServedModel,
    max_tokens: int,
    logprobs: tuple[int | None, int | None],
    seed: int,
    bad_words: tuple[tuple[int, ...], ...],
    grammar: str,
) -> SamplingParams:
    given = {name: value for name in MODEL_SAMPLING if (value := getattr(body, name)) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    return SamplingParams(
        **{**model.defaults.sampling, **given},
        max_tokens=max_tokens,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=tuple(_logit_bias(body)),
        min_tokens=body.min_tokens,
        stop_token_ids=tuple(body.stop_token_ids),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        bad_words=bad_words,
        grammar=grammar,
        ignore_eos=body.ignore_eos,
        logprobs=logprobs[0],
        prompt_logprobs=logprobs[1],
        seed=seed,
    )


def _seeds(body: CommonBody) -> Iterator[int]:
    """Yields one seed a sample; negative ones, which OpenAI allows, are taken modulo 2**64."""
    if body.seed is None:
        seed = new_seed()
    elif -(2**63) <= body.seed <= MAX_SEED:
        seed = body.seed & MAX_SEED
    else:
        raise InvalidRequestError("seed", f"must be from -2**63 to 2**64-1, got {body.seed}")
    for index in range(body.n):
        yield sample_seed(seed, index)


def _logit_bias(body: CommonBody) -> Iterator[tuple[int, float]]:
    for name, bias in body.logit_bias.items():
        if not (name.isascii() and name.isdigit() and len(name) <= len(str(MAX_SEED))):
            raise InvalidRequestError(f"logit_bias.{name[:40]}", "the key must be a token id")
        yield int(name), bias


def _stop_strings(stop: Any) -> list[str]:
    if stop is None:
        return []
    if isinstance(stop, str):
        return [stop]
    if not isinstance(stop, list):
        raise InvalidRequestError("stop", "must be a string or a list of strings")
    for index, entry in enumerate(stop):
        if not isinstance(entry, str):
            raise InvalidRequestError(f"stop[{index}]", "must be a string")
    return stop


def _split_prompts(prompt: Any) -> list[tuple[str, Any]]:
    """Returns (field name, text or token ids) of each prompt in the four shapes OpenAI allows."""
    if isinstance(prompt, str) or is_token_list(prompt):
        return [("prompt", prompt)]
    if not isinstance(prompt, list):
        raise InvalidRequestError("prompt", "must be a string, a list of strings, or one or more lists of token ids")
    if not prompt:
        raise InvalidRequestError("prompt", "must not be empty")
    if len(prompt) > MAX_CHOICES:
        raise InvalidRequestError("prompt", f"has {len(prompt)} entries, at most {MAX_CHOICES} are allowed")
    wanted = type(prompt[0])
    for index, entry in enumerate(prompt):
        if not isinstance(entry, str | list) or type(entry) is not wanted:
            raise InvalidRequestError(
                f"prompt[{index}]", "must be of one kind with the others: strings or lists of token ids"
            )
        if isinstance(entry, list) and entry and not is_token_list(entry):
            raise InvalidRequestError(f"prompt[{index}]", "must hold token ids, which are whole numbers")
    return [(f"prompt[{index}]", entry) for index, entry in enumerate(prompt)]


def is_token_list(value: Any) -> bool:
    """Tells whether a JSON value is a list of whole numbers, one at least."""
    return isinstance(value, list) and bool(value) and all(type(entry) is int for entry in value)


def _encode_prompt(model: ServedModel, field: str, value: str | list[int], keep_last: int | None) -> _Prompt:
    if isinstance(value, str):
        return _Prompt(field=field, token_ids=encode_text(model, value, field=field, keep_last=keep_last))
    return _Prompt(field=field, token_ids=check_prompt(model, value, field=field, keep_last=keep_last))


def chat_tokens(
    body: ChatFields,
    model: ServedModel,
    unknown: UnknownFields,
    keep_last: int | None = None,
    *,
    tools: Sequence[Json] = (),
    extra: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Returns the tokens of a chat by the model's template.

    Args:
        body: Its messages.
        model: Whose template it is.
        unknown: Is told of fields of its messages.
        keep_last: So many of its last tokens are kept; None: all.
        tools: Those that the template is told of.
        extra: Variables of the template, over which those of the body win.

    Raises:
        InvalidRequestError: There is no template, it refuses the messages, or one of them is wrong or too long.
    """
    template = _template(body, model)
    if template is None and model.codec.chat_template is None:
        raise InvalidRequestError(
            "messages", f"model {model.identity.name!r} has no chat template; use /v1/completions"
        )
    if not body.messages:
        raise InvalidRequestError("messages", "must hold at least one message")
    taken = TEMPLATE_NAMES & body.chat_template_kwargs.keys()
    if taken:
        raise InvalidRequestError(f"chat_template_kwargs.{min(taken)}", "is set by the server")
    if len(body.messages) > model.context_len:
        raise InvalidRequestError(
            "messages",
            f"has {len(body.messages)} entries, more than the context of {model.context_len} tokens holds",
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequestError("add_generation_prompt", "must not be true with continue_final_message")
    asks = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    messages = [_plain_message(message, f"messages[{index}]", unknown) for index, message in enumerate(body.messages)]
    variables = {**(extra or {}), **body.chat_template_kwargs, **({"tools": list(tools)} if tools else {})}
    return model.codec.encode_chat(
        messages,
        {**variables, "add_generation_prompt": asks},
        field="messages",
        context_len=model.context_len,
        keep_last=keep_last,
        template=template,
        continue_last=body.continue_final_message,
    )


def _template(body: ChatFields, model: ServedModel) -> ChatTemplate | None:
    """Returns the chat template that a request brings; None: it brings none."""
    if body.chat_template is None:
        return None
    if not model.trusts_templates:
        raise InvalidRequestError("chat_template", "is not allowed here (--trust-request-chat-template allows it)")
    if len(body.chat_template) > MAX_TEMPLATE_CHARACTERS:
        raise InvalidRequestError("chat_template", f"must have at most {MAX_TEMPLATE_CHARACTERS} characters")
    try:
        return model.codec.template(body.chat_template)
    except ConfigError as error:
        raise InvalidRequestError("chat_template", str(error)) from error


def _plain_message(given: Any, field: str, unknown: UnknownFields) -> Json:
    message = read_fields(ChatMessage, given, unknown, field)
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if message.content is None and not message.tool_calls and reasoning is None:
        raise InvalidRequestError(f"{field}.content", "is required")
    content = "" if message.content is None else message.content
    plain: Json = {"role": message.role, "content": read_text(TextPart, content, unknown, f"{field}.content")}
    calls = [
        read_fields(ToolCall, each, unknown, f"{field}.tool_calls[{at}]") for at, each in enumerate(message.tool_calls)
    ]
    if calls:
        plain["tool_calls"] = [_plain_call(each) for each in calls]
    if reasoning is not None:
        # Templates do not agree on its name.
        plain |= {"reasoning_content": reasoning, "reasoning": reasoning, "thinking": reasoning}
    optional = {"name": message.name, "tool_call_id": message.tool_call_id}
    return plain | {name: value for name, value in optional.items() if value is not None}


def _plain_call(call: ToolCall) -> Json:
    """Returns a call as templates want it: arguments as an object, if they are one and not broken off."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = call.function.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
