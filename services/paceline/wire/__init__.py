"""Encodes values of `core` as protobuf messages and decodes them; no other package builds messages between services.

It checks shape and range of a peer's values, never their meaning: the session state machines check whether a commit
fits its session. It knows no sockets, clocks or models.
"""

from paceline.wire.common import (
    identity_from_pb,
    identity_to_pb,
    sampling_from_pb,
    sampling_to_pb,
    speculation_from_pb,
    speculation_record_from_pb,
    speculation_record_to_pb,
    speculation_to_pb,
    timings_from_pb,
    timings_to_pb,
)
from paceline.wire.drafts import (
    draft_request_from_pb,
    draft_request_to_pb,
    draft_response_from_pb,
    draft_response_to_pb,
    in_parts,
)
from paceline.wire.sessions import (
    committed_from_pb,
    committed_to_pb,
    generate_request_from_pb,
    generate_request_to_pb,
    position_logprobs_to_pb,
)

__all__ = [
    "committed_from_pb",
    "committed_to_pb",
    "draft_request_from_pb",
    "draft_request_to_pb",
    "draft_response_from_pb",
    "draft_response_to_pb",
    "generate_request_from_pb",
    "generate_request_to_pb",
    "identity_from_pb",
    "identity_to_pb",
    "in_parts",
    "position_logprobs_to_pb",
    "sampling_from_pb",
    "sampling_to_pb",
    "speculation_from_pb",
    "speculation_record_from_pb",
    "speculation_record_to_pb",
    "speculation_to_pb",
    "timings_from_pb",
    "timings_to_pb",
]
