"""Checkpoint folders: where they come from, what their files say, and whether they are whole."""
