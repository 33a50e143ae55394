"""The verifiers as this gateway knows them, and which gets a session."""
