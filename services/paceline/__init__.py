"""Paceline serves language models with speculative decoding whose drafter is a tier of its own."""

__version__ = "0.1.0"
