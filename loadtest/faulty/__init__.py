"""Services that can go wrong in ways that need the inside of a process; benches start them instead of the real ones.

`python -m loadtest.faulty.verifier` takes the flags of `paceline.verifier` and is that verifier, until it is ordered to
do wrong (`loadtest.faulty.orders`). The product itself holds no code for it.
"""
