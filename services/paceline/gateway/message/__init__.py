"""The message that the text of an answer is: reasoning, content and calls of tools."""
