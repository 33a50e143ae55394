"""Readers of reasoning, a module for each way in which models set it apart."""
