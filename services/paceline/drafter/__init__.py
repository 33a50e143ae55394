"""The service that runs the draft model and grows draft trees."""
