"""Sources of draft nodes."""
