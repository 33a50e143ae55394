"""What a request must hold before an engine sees it; knows the model's limits and nothing of load."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.acceptance_rules import Rules
from paceline.core.errors import InvalidRequestError
from paceline.core.messages import GenerateRequest, ModelIdentity
from paceline.core.params import CHAIN_RULES, TIER_METHODS, check_token_ids

# Gateways send a digest.
MAX_SALT_CHARS = 128


def check_request(
    request: GenerateRequest, identity: ModelIdentity, *, max_model_len: int, methods: Sequence[str], rules: Rules
) -> None:
    """Refuses what this verifier cannot serve, however idle it is.

    Args:
        request: What a gateway sent.
        identity: The target model.
        max_model_len: Most tokens of a session, prompt and output.
        methods: Ways to draft that are served.
        rules: Acceptance rules that are served.

    Raises:
        InvalidRequestError: Names the field and the limit.
    """
    if len(request.cache_salt) > MAX_SALT_CHARS:
        raise InvalidRequestError(
            "cache_salt", f"must have at most {MAX_SALT_CHARS} characters, got {len(request.cache_salt)}"
        )
    check_token_ids("prompt_token_ids", request.prompt_token_ids, identity.vocab_size)
    check_token_ids("committed_token_ids", request.committed_token_ids, identity.vocab_size)
    request.sampling.check_vocabulary(identity.vocab_size, identity.eos_token_ids)
    unserved = sorted(set(request.speculation.methods) - set(methods))
    if unserved:
        raise InvalidRequestError("speculation.method", f"{unserved[0]} is not served here, only {', '.join(methods)}")
    rule = rules.of(request.speculation)
    wanted = request.speculation.methods or tuple(methods)
    if rule.drafts in CHAIN_RULES and not set(wanted) & set(TIER_METHODS):
        raise InvalidRequestError(
            "speculation.acceptance",
            f"{rule.name} needs the method {' or '.join(TIER_METHODS)}, and here it is {'+'.join(wanted)}",
        )
    prompt_len, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    if prompt_len + max_tokens > max_model_len:
        raise InvalidRequestError(
            "max_tokens",
            f"{prompt_len} prompt tokens + {max_tokens} output tokens exceed the context of {max_model_len}",
        )
    sampling = request.sampling
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else identity.eos_token_ids)}
    if not ends.isdisjoint(request.committed_token_ids):
        raise InvalidRequestError("committed_token_ids", "must not hold a token that ends the text")
    if len(request.committed_token_ids) >= max_tokens:
        raise InvalidRequestError("committed_token_ids", "must be fewer than max_tokens")
