"""The drafter tier under vLLM: `Proposer` goes into vLLM's worker, a helper process beside it talks to drafters.

`vllm serve TARGET --speculative-config '{"method": "custom_class", "model": "paceline.vllm.Proposer", ...}'`; nothing
here imports vLLM before it is asked for that class.
"""

from paceline.vllm.proposer import Proposer

__all__ = ["Proposer"]
