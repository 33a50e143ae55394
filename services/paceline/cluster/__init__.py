"""Starts and supervises fleets."""
