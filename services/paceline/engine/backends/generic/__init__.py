"""Transformers' own modules with our attention and linears."""
