"""Agents as people run them: each asks one question, calls tools until there is an answer, and can go on later."""
