"""Training of the demo pair: corpus, tokenizer, target, distilled drafter, evaluation and export.

Nothing that serves imports this package, apart from `widen`, which `paceline up` runs at first
start.
"""
