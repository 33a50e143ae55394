"""Scripts that run inside the peers' own environments, by path: they import the stdlib and that peer's libraries."""
