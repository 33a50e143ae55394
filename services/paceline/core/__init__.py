"""Pure state machines and policies: no I/O, no clock, no torch."""
