"""Anthropic's API: /v1/messages, over the sessions of chats."""
