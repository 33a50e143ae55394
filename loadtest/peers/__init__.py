"""Other engines on the same pair, each in an environment of its own in the user's cache folder, never a dependency."""

from loadtest.peers.bench import main

__all__ = ["main"]
