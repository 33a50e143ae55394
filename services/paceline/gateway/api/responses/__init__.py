"""OpenAI's newer API: /v1/responses, over the sessions of chats."""
