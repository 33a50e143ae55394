"""Who may come in, and how much of a gateway each caller gets."""
