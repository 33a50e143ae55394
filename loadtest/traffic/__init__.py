"""The open-loop replayer: what is sent, how it is timed, and what the figures show."""
