"""All that measures: each bench prints its figures and, on its last line, one JSON object with `"ok"`."""
