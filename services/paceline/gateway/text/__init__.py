"""Text and tokens: templates, tokenizing, detokenizing, stop strings."""
