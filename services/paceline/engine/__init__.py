"""The target and draft models at work: decoder, paged KV cache, sampler, engine thread."""
