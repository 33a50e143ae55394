"""Bad messages for every door of a fleet, each with the statuses that are right for it."""
