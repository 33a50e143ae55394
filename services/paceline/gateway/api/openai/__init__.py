"""OpenAI's completions and chats, with vLLM's fields."""
