"""The path of every session, whichever door it came through: placement, text, records, takeover."""
