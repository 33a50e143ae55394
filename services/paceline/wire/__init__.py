"""Encodes values of `core` as protobuf messages and decodes them; no other package builds messages between services.

It checks shape and range of a peer's values, never their meaning: the session state machines check whether a commit
fits its session. It knows no sockets, clocks or models.
"""

from paceline.wire.common import identity_from_pb as identity_from_pb
from paceline.wire.common import identity_to_pb as identity_to_pb
from paceline.wire.common import sampling_from_pb as sampling_from_pb
from paceline.wire.common import sampling_to_pb as sampling_to_pb
from paceline.wire.common import speculation_from_pb as speculation_from_pb
from paceline.wire.common import speculation_record_from_pb as speculation_record_from_pb
from paceline.wire.common import speculation_record_to_pb as speculation_record_to_pb
from paceline.wire.common import speculation_to_pb as speculation_to_pb
from paceline.wire.common import timings_from_pb as timings_from_pb
from paceline.wire.common import timings_to_pb as timings_to_pb
from paceline.wire.drafts import draft_request_from_pb as draft_request_from_pb
from paceline.wire.drafts import draft_request_to_pb as draft_request_to_pb
from paceline.wire.drafts import draft_response_from_pb as draft_response_from_pb
from paceline.wire.drafts import draft_response_to_pb as draft_response_to_pb
from paceline.wire.drafts import in_parts as in_parts
from paceline.wire.drafts import size_of as size_of
from paceline.wire.drafts import verifier_from_pb as verifier_from_pb
from paceline.wire.sessions import AskedSession as AskedSession
from paceline.wire.sessions import LogPart as LogPart
from paceline.wire.sessions import generate_request_from_pb as generate_request_from_pb
from paceline.wire.sessions import log_from_pb as log_from_pb
from paceline.wire.sessions import log_to_pb as log_to_pb
from paceline.wire.sessions import position_logprobs_to_pb as position_logprobs_to_pb
from paceline.wire.sessions import size_of_event as size_of_event
from paceline.wire.sessions import start_session_to_pb as start_session_to_pb
from paceline.wire.sessions import starts_from_pb as starts_from_pb
