"""What computes the steps of a decoder: compiled loops (cpu), torch operations, or transformers' own modules."""
