"""The service that runs the target model and commits tokens."""
