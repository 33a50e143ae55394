"""A fleet on a Ray cluster: Ray places the services and moves them; no token passes through it."""
