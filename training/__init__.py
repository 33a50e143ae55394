"""The recipe of the demo models, and trainings of drafters for a target of one's own; not part of the package.

`make train` makes the demo target, its draft model, its Medusa heads and its EAGLE-3 head.
"""
