"""The target and draft models at work: decoder, paged KV cache, sampler, and the loop that runs them."""
