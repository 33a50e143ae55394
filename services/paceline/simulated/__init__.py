"""Devices that take their time and compute nothing: profiles, guesses, and an engine behind the real services."""
