"""Readers of tool calls, a module for each way in which models write them."""
