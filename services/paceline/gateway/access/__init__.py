"""Access to a gateway, and each caller's share of it."""
