"""vLLM inside a verifier: gateways see the same service, and the drafter tier is `paceline.vllm`.

Only `launch` imports vLLM.
"""
