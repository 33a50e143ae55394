"""All that measures: each bench prints its figures and, on its last line, one JSON object with `"ok"`.

`demo` is a tool beside them.
"""
