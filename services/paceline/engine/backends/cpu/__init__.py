"""Compiled loops and packed linears: a row's bits are independent of the other rows."""
