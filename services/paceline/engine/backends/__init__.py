"""Backends that run a decoder's steps: compiled loops (cpu), torch operations, or transformers' own modules."""
