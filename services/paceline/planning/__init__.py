"""How many verifiers and drafters a load needs: a simulation around the controller, policy and trees of `core`.

It stands on the core and knows no network, no model and no clock; facts about hardware come from profiles.
"""
