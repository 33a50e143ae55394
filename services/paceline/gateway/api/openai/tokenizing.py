"""POST /tokenize and /detokenize, in vLLM's shapes.

They run no session: a tokenizer and a chat template do all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.core.params import check_token_ids
from paceline.gateway.api.endpoints.endpoint import BodyReader, Call, Work
from paceline.gateway.api.openai.bodies import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from paceline.gateway.api.openai.prompts import chat_tokens, is_token_list
from paceline.gateway.api.openai.tools import read_toolbox
from paceline.gateway.http.fields import UnknownFields, read_fields
from paceline.gateway.sessions.sessions import Sessions

Json = dict[str, Any]


async def answer_without_session(
    sessions: Sessions, reader: BodyReader, answer: Callable[[Sessions, Json, UnknownFields], Json], call: Call
) -> Work:
    """Reads a request that runs no session; returns what answers it.

    Args:
        sessions: Knows the models.
        answer: `tokenize`, `detokenize`, or the same of another API.
    """
    return call.exchange.whole(await reader.read(call, partial(answer, sessions)))


def tokenize(sessions: Sessions, fields: Json, unknown: UnknownFields) -> Json:
    """Returns the tokens of a prompt, or of a chat by the model's template.

    Raises:
        InvalidRequestError: A field is wrong, or there are more tokens than the context holds.
    """
    body: TokenizeChatBody | TokenizeTextBody
    if fields.get("messages") is not None and fields.get("prompt") is None:
        body = read_fields(TokenizeChatBody, fields, unknown)
        model = sessions.model(body.model)
        tools = read_toolbox(body.tools, None, True, unknown).tools
        token_ids = chat_tokens(body, model, unknown, tools=tools)
    else:
        body = read_fields(TokenizeTextBody, fields, unknown)
        model = sessions.model(body.model)
        token_ids = model.codec.encode(
            body.prompt, field="prompt", special_tokens=body.add_special_tokens, context_len=model.context_len
        )
    pieces = [model.codec.piece(each) for each in token_ids] if body.return_token_strs else None
    return {"count": len(token_ids), "max_model_len": model.context_len, "tokens": token_ids, "token_strs": pieces}


def detokenize(sessions: Sessions, fields: Json, unknown: UnknownFields) -> Json:
    """Returns the text of tokens, special ones spelled out.

    Raises:
        InvalidRequestError: A field is wrong, or there are more tokens than the context holds.
    """
    body = read_fields(DetokenizeBody, fields, unknown)
    model = sessions.model(body.model)
    if body.tokens != [] and not is_token_list(body.tokens):
        raise InvalidRequestError("tokens", "must be a list of token ids")
    if len(body.tokens) > model.context_len:
        raise InvalidRequestError(
            "tokens", f"has {len(body.tokens)} entries, the context holds {model.context_len} tokens"
        )
    check_token_ids("tokens", body.tokens, model.identity.vocab_size)
    return {"prompt": model.codec.decode(body.tokens, special_tokens=True)}
