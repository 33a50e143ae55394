"""Grammars that answers have to follow."""
