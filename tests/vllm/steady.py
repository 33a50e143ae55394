"""The proposer as it is, but its helper hands out all the guesses that there are, at any load and temperature.

On a CPU the controller is right to let drafts be where they cost more than they bring, and a test would see none.
"""

from paceline.vllm import Proposer, tier_client

tier_client.HELPER_MODULE = "tests.vllm.steady_helper"

__all__ = ["Proposer"]
