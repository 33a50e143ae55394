"""Measures acceptance: how often a drafter of any kind guesses what a target writes."""
