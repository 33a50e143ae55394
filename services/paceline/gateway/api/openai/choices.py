"""Makes sessions of a checked OpenAI body: one for each sample of each prompt.

It knows the request models and the tokenizer; it does no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.core.params import MAX_SEED, MAX_TOP_LOGPROBS, SAMPLING, SESSION, SamplingParams, SpeculationParams
from paceline.core.prediction import MAX_PREDICTED_TOKENS
from paceline.gateway.api.openai.bodies import ChatBody, CommonBody, CompletionBody
from paceline.gateway.api.openai.prompts import chat_tokens, split_prompts
from paceline.gateway.api.openai.tools import read_toolbox
from paceline.gateway.fleet.served_model import ServedModel
from paceline.gateway.grammars import calls as call_grammars
from paceline.gateway.grammars.formats import (
    grammar_of_choices,
    grammar_of_json_schema,
    grammar_of_lark,
    grammar_of_regex,
    loosened,
)
from paceline.gateway.grammars.partial import Opening, after_reasoning
from paceline.gateway.http.fields import UnknownFields, read_text
from paceline.gateway.message.form import LLAMA3_JSON, TYPED, MessageForm, begins_thinking
from paceline.gateway.message.tools import Toolbox
from paceline.gateway.sessions.request import (
    DEFAULT_MAX_TOKENS,
    MAX_CHOICES,
    MAX_LOGPROBS,
    SessionRequest,
    check_logprobs,
    check_stops,
    new_seed,
)

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_FORMATS = ("text", "json_object", "json_schema")
# A field that asks for a grammar, and what makes the grammar.
_Wanted = list[tuple[str, Callable[[], str]]]


def grammar_of(body: CommonBody) -> tuple[str, str]:
    """Returns the grammar that an answer must follow, and the field that asks for it; both empty: none does.

    Raises:
        InvalidRequestError: The grammar cannot be read, or the body gives more than one.
    """
    wanted = [*_response_format(body), *_structured_outputs(body)]
    if not wanted:
        return "", ""
    (field, make), *others = wanted
    if others:
        raise InvalidRequestError(others[0][0], f"excludes {field}")
    return make(), field


def _response_format(body: CommonBody) -> _Wanted:
    given = body.response_format
    if given is None:
        return []
    kind = given.get("type")
    if kind not in _FORMATS:
        raise InvalidRequestError("response_format.type", f"must be one of {', '.join(_FORMATS)}, got {kind!r}")
    if kind == "text":
        return []
    if kind == "json_object":
        return [("response_format", partial(grammar_of_json_schema, _ANY_OBJECT, field="response_format"))]
    wrapper = given.get("json_schema")
    if not isinstance(wrapper, dict):
        raise InvalidRequestError("response_format.json_schema", "must be an object with a schema")
    field = "response_format.json_schema.schema"
    schema = _schema(wrapper.get("schema"), field)
    if wrapper.get("strict") is not False:
        return [(field, partial(grammar_of_json_schema, schema, field=field))]
    return [(field, lambda: grammar_of_json_schema(loosened(schema, field=field), field=field, exact=False))]


def _structured_outputs(body: CommonBody) -> _Wanted:
    given = {name: value for name, value in (body.structured_outputs or {}).items() if value is not None}
    pattern = given.pop("whitespace_pattern", None)
    if pattern is not None and not isinstance(pattern, str):
        raise InvalidRequestError("structured_outputs.whitespace_pattern", "must be a string")
    unknown = given.keys() - {"json", "regex", "choice", "grammar", "json_object"}
    if unknown:
        raise InvalidRequestError(f"structured_outputs.{min(unknown)}", "is not supported by this server")
    return [
        (f"structured_outputs.{name}", _maker(name, f"structured_outputs.{name}", value, pattern))
        for name, value in given.items()
        if value is not False
    ]


def _maker(name: str, field: str, value: Any, whitespace_pattern: str | None) -> Callable[[], str]:
    if name in ("json", "json_object"):
        schema = _ANY_OBJECT if name == "json_object" else _schema(value, field)
        return partial(grammar_of_json_schema, schema, field=field, whitespace_pattern=whitespace_pattern)
    if name == "choice":
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise InvalidRequestError(field, "must be a list of strings")
        return partial(grammar_of_choices, value, field=field)
    if not isinstance(value, str):
        raise InvalidRequestError(field, "must be a string")
    return partial(grammar_of_regex if name == "regex" else grammar_of_lark, value, field=field)


def _schema(value: Any, field: str) -> Mapping[str, Any]:
    """Returns a schema that is given as an object or as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidRequestError(field, "must be a JSON schema, but is not JSON") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(field, "must be a JSON schema: an object")
    return value


PREDICTION = "prediction"
# Characters read of a prediction; few tokens of a text have more than four characters on the average.
MAX_PREDICTED_CHARACTERS = 4 * MAX_PREDICTED_TOKENS
# Enough to see whether it ends within reasoning.
PROMPT_END_TOKENS = 16
_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15


def completion_sessions(
    body: CompletionBody, model: ServedModel, request_id: str, unknown: UnknownFields
) -> list[SessionRequest]:
    """Returns the sessions of a text completion, samples of the same prompt side by side.

    Raises:
        InvalidRequestError: A field does not fit the model or the limits of the product.
    """
    given = split_prompts(body.prompt)
    if len(given) * body.n > MAX_CHOICES:
        raise InvalidRequestError(
            "prompt" if len(given) > 1 else "n",
            f"{len(given)} prompts times n = {body.n} exceed the limit of {MAX_CHOICES} choices",
        )
    keep_last = model.prompt_limit(body.truncate_prompt_tokens, body.max_tokens)
    tokens_of = partial(model.prompt_tokens, keep_last=keep_last, special_tokens=body.add_special_tokens)
    prompts = [tokens_of(value, field=field) for field, value in given]
    wanted = _prompt_logprobs(body)
    prompt_logprobs = body.logprobs if body.echo and wanted is None else wanted
    prompt_only = body.max_tokens == 0 and (body.echo or wanted is not None)
    max_tokens = 1 if prompt_only else body.max_tokens
    least = min(max_tokens or 1, model.context_len)
    most = _most_tokens(body, prompts, least, body.logprobs, prompt_logprobs)
    grammar, grammar_field = grammar_of(body)
    sampling = _sampling(body, model, grammar, body.logprobs, prompt_logprobs)
    default = min(DEFAULT_MAX_TOKENS, most)
    limit = partial(model.output_limit, max_tokens=max_tokens, default=default, field="max_tokens")
    more = {
        "prompt_only": prompt_only,
        "grammar_field": grammar_field,
        "speculation": _speculation(body, model, unknown),
    }
    sessions = _sessions(body, model, request_id, prompts, sampling, limit, **more)
    if not body.echo:
        return sessions
    echoes = [
        value
        if isinstance(value, str) and keep_last is None
        else model.codec.decode(token_ids, special_tokens=not body.skip_special_tokens)
        for (_, value), token_ids in zip(given, prompts, strict=True)
    ]
    return [replace(session, echo=echoes[index // body.n]) for index, session in enumerate(sessions)]


def chat_sessions(body: ChatBody, model: ServedModel, request_id: str, unknown: UnknownFields) -> list[SessionRequest]:
    """Returns the sessions of a chat completion, one a sample; `unknown` collects unknown fields of its messages.

    Raises:
        InvalidRequestError: A field does not fit the model or the limits of the product.
    """
    if body.n > MAX_CHOICES:
        raise InvalidRequestError("n", f"must be at most {MAX_CHOICES}, got {body.n}")
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens: int | None = getattr(body, field)
    logprobs = _chat_logprobs(body)
    keep_last = model.prompt_limit(body.truncate_prompt_tokens, max_tokens)
    toolbox = read_toolbox(body.tools, body.tool_choice, body.parallel_tool_calls, unknown)
    token_ids = chat_tokens(body, model, unknown, keep_last, tools=toolbox.tools, extra=_effort(body))
    token_ids = model.prompt_tokens(token_ids, field="messages")
    least = min(max_tokens or 1, model.context_len)
    most = _most_tokens(body, [token_ids], least, logprobs, _prompt_logprobs(body))
    # Calls that have to be made leave no room for content of another form.
    content_grammar, grammar_field = ("", "tools") if toolbox.enforced else grammar_of(body)
    prompt_end = _prompt_end(model, token_ids)
    grammar = _chat_grammar(content_grammar, model, toolbox, prompt_end)
    sampling = _sampling(body, model, grammar, logprobs, _prompt_logprobs(body))
    default = min(model.defaults.max_new_tokens or model.context_len, most)
    limit = partial(model.output_limit, max_tokens=max_tokens, default=default, field=field)
    form = _form(model, toolbox, prompt_end, bool(content_grammar))
    more = {
        "form": form,
        "grammar_field": grammar_field or "tools",
        "speculation": _speculation(body, model, unknown),
    }
    return _sessions(body, model, request_id, [token_ids], sampling, limit, **more)


def _most_tokens(
    body: CommonBody, prompts: Sequence[tuple[int, ...]], max_tokens: int, logprobs: int | None, of_prompt: int | None
) -> int:
    """Returns how many tokens each choice may have where a request names no limit, for the sake of log probabilities.

    Args:
        max_tokens: The least that each choice will have.
        logprobs: Alternatives asked for at each token; None: nothing.
        of_prompt: The same at each token of a prompt.

    Raises:
        InvalidRequestError: It asks for more of them than can be held until the answer is whole.
    """
    num_held = body.n * sum(map(len, prompts)) * _num_entries(of_prompt)
    check_logprobs(num_held, field="prompt_logprobs")
    if logprobs is None or body.stream:
        return MAX_LOGPROBS
    num_by_token = body.n * len(prompts) * _num_entries(logprobs)
    check_logprobs(num_held + max_tokens * num_by_token, field="logprobs")
    return (MAX_LOGPROBS - num_held) // num_by_token


def _num_entries(alternatives: int | None) -> int:
    """Returns the log probabilities of one token; what is beyond the limit is refused elsewhere."""
    return 0 if alternatives is None else 1 + min(max(0, alternatives), MAX_TOP_LOGPROBS)


def _prompt_logprobs(body: CommonBody) -> int | None:
    """Returns how many alternatives are wanted at each token of the prompt; a stream has no place for any."""
    return None if body.stream else body.prompt_logprobs


def _chat_logprobs(body: ChatBody) -> int | None:
    top_logprobs = body.top_logprobs or 0
    if top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs", "is only allowed with logprobs: true")
    if not 0 <= top_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequestError("top_logprobs", f"must be from 0 to {MAX_TOP_LOGPROBS}, got {top_logprobs}")
    return top_logprobs if body.logprobs else None


def _prompt_end(model: ServedModel, token_ids: Sequence[int]) -> str:
    """Returns the end of a prompt, which shows whether the answer begins within reasoning; empty: it never does."""
    return model.codec.decode(token_ids[-PROMPT_END_TOKENS:], special_tokens=True) if model.families.reasoning else ""


def _chat_grammar(content_grammar: str, model: ServedModel, toolbox: Toolbox, prompt_end: str) -> str:
    """Returns the grammar of an answer; empty: none.

    Args:
        content_grammar: Grammar of the content; empty: none.
        model: Model of the answer.
        prompt_end: See `Opening`.
    """
    families = model.families
    opening = Opening(reasoning=families.reasoning, prompt_end=prompt_end, token_of=model.codec.added_token_id)
    if toolbox.enforced:
        content_grammar = call_grammars.enforced_calls(toolbox)
    elif ((content_grammar and toolbox.parsed) or toolbox.bound) and families.tool_calls in call_grammars.FAMILIES:
        return call_grammars.calls_amid_text(toolbox, families.tool_calls, opening, content_grammar)
    if content_grammar:
        return after_reasoning(content_grammar, opening, field="tools" if toolbox.enforced else "response_format")
    return ""


def _form(model: ServedModel, toolbox: Toolbox, prompt_end: str, bound: bool) -> MessageForm | None:
    """Returns how answers to a chat are read; None: all of them is content.

    Args:
        model: Model of the answer.
        prompt_end: See `Opening`.
        bound: Whether its content has a format; it holds no calls then if no grammar knows how the model writes them.
    """
    reasoning, family = model.families.reasoning, model.families.tool_calls
    may_call = toolbox.parsed and not toolbox.enforced and (not bound or family in call_grammars.FAMILIES)
    calls = family if may_call else ""
    if not (reasoning or calls or toolbox.enforced):
        return None
    return MessageForm(
        reasoning=reasoning,
        thinks=begins_thinking(reasoning, prompt_end),
        tool_calls=calls,
        enforced=toolbox.enforced,
        named=toolbox.named,
        types=toolbox.types if calls in TYPED else {},
        short_ids=model.codec.has_short_call_ids,
        parallel=toolbox.parallel or not toolbox.parsed,
        only=tuple(toolbox.names) if bound and calls == LLAMA3_JSON else (),
    )


def _effort(body: ChatBody) -> dict[str, Any]:
    """Returns the variables of a template for the effort; `none` switches templates off that know only a switch."""
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
    prompts: Sequence[tuple[int, ...]],
    sampling: Callable[..., SamplingParams],
    output_limit: Callable[[int], int],
    **more: Any,
) -> list[SessionRequest]:
    """Returns a session for each sample of each prompt.

    Args:
        model: The model it asks for.
        request_id: Prefix of session names.
        sampling: Takes `max_tokens` and `seed`.
        output_limit: Most tokens to generate after a prompt of that length.
        more: Further fields of all sessions.
    """
    stops = check_stops(_stop_strings(body.stop))
    session = partial(
        SessionRequest,
        model=model,
        stops=stops,
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        **{name: getattr(body, name) for name in SESSION if hasattr(body, name)},
        return_token_ids=body.return_token_ids,
        token_origins=body.speculation.token_origins,
        whole=not body.stream,
        **more,
    )
    sessions: list[SessionRequest] = []
    for token_ids in prompts:
        max_tokens = output_limit(len(token_ids))
        for seed in _seeds(body):
            params = sampling(max_tokens=max_tokens, seed=seed)
            params.check_vocabulary(model.identity.vocab_size, model.identity.eos_token_ids)
            session_id = f"{request_id}-{len(sessions)}"
            sessions.append(session(session_id=session_id, prompt_token_ids=token_ids, sampling=params))
    return sessions


def _speculation(body: CommonBody, model: ServedModel, unknown: UnknownFields) -> SpeculationParams:
    predicted: tuple[int, ...] = ()
    if body.prediction is not None and body.prediction.content:
        text = read_text(body.prediction.content, unknown, f"{PREDICTION}.content")[:MAX_PREDICTED_CHARACTERS]
        # However long it is, nothing is refused for it.
        limit = len(text.encode(errors="replace"))
        predicted = model.codec.encode(text, field=PREDICTION, special_tokens=False, context_len=limit)
    return SpeculationParams(
        enabled=body.speculation.enabled,
        max_draft_tokens=body.speculation.max_draft_tokens,
        acceptance=body.speculation.acceptance,
        method=body.speculation.method,
        predicted_token_ids=predicted[:MAX_PREDICTED_TOKENS],
    )


def _sampling(
    body: CommonBody,
    model: ServedModel,
    grammar: str,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> Callable[..., SamplingParams]:
    """Returns what makes sampling parameters of `max_tokens` and `seed`."""
    given = {name: value for name in SAMPLING if (value := getattr(body, name, None)) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    made = {
        "stop_token_ids": tuple(body.stop_token_ids),
        "allowed_token_ids": tuple(body.allowed_token_ids or ()),
        "logit_bias": tuple(_logit_bias(body)),
        "bad_words": _bad_word_tokens(model, body.bad_words),
        "grammar": grammar,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    return partial(SamplingParams, **{**model.defaults.sampling, **given, **made})


def _bad_word_tokens(model: ServedModel, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of words that must not be generated: at the beginning of a text, and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        field, bare = f"bad_words[{index}]", word.lstrip() or word
        for text in (bare, f" {bare}"):
            found[model.codec.encode(text, field=field, special_tokens=False, context_len=model.context_len)] = None
    return tuple(found)


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


def sample_seed(seed: int, index: int) -> int:
    """Returns the seed of the index-th of several samples; that of the first one is the request's own.

    SplitMix64 (Steele, Lea and Flood, 2014) keeps the streams of neighbouring seeds apart.
    """
    if index == 0:
        return seed
    state = (seed + index * _GOLDEN_RATIO_64) & MAX_SEED
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MAX_SEED
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MAX_SEED
    return state ^ (state >> 31)
