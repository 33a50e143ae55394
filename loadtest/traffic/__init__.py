"""The open-loop replayer: what is sent, how it is sent and timed, and what is said of it."""
