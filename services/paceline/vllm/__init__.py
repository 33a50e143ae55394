"""The drafter tier under vLLM: `Proposer` goes into vLLM's worker, a helper process beside it talks to drafters.

`vllm serve TARGET --speculative-config '{"method": "custom_class", "model": "paceline.vllm.Proposer", ...}'`; nothing
here imports vLLM, or anything large, before it is asked for that class.
"""


def __getattr__(name: str) -> type:
    if name != "Proposer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from paceline.vllm.proposer import Proposer

    return Proposer
