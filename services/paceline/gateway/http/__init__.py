"""The HTTP door: connections, bodies, responses, errors, and the description of the API."""
