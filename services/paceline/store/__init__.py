"""Registry of replicas and records of sessions."""
