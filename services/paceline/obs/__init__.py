"""Metrics, traces and logging."""
