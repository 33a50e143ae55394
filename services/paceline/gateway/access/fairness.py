"""How many of a gateway's places one API key may hold: all while nobody else could want them, else a share.

Pure: numbers in, a refusal or nothing out.
"""

from __future__ import annotations

from collections.abc import Mapping

# At most this part of the places is kept free for keys that run nothing at the moment.
RESERVED_PART = 8


def fits(
    num_wanted: int, *, key: str, held: Mapping[str, int], num_keys: int, max_sessions: int, unit: int = 1
) -> bool:
    """Whether a key may take places now.

    With M places in all, h_k of them held by key k, F free ones, K keys that hold some or ask now, I = the keys that
    hold none and do not ask, and B = the keys other than k that hold less than their share:

        share   = max(1, M // (K + [I > 0]))      an equal part, one of them for whoever comes next
        reserve = min(B * unit, ceil(M / 8))      kept free for those below their share
        fits  <=>  n <= F  and  (h_k + n <= share  or  n <= F - reserve)

    So a key without rivals may take all places; rivals that want none cost it an eighth at most; and what ends goes to
    the keys below their share first, whoever asks first: greedy keys shrink to it without any session being stopped.

    Args:
        num_wanted: n, the places of one request.
        key: Name of the key that asks.
        held: Places held by each key; a key that holds none may be left out.
        num_keys: Keys that could ask.
        max_sessions: M.
        unit: Places that one request takes at most, where these are bytes.
    """
    num_free = max_sessions - sum(held.values())
    rivals = [count for name, count in held.items() if count and name != key]
    num_idle = max(0, num_keys - len(rivals) - 1)
    share = max(1, max_sessions // (1 + len(rivals) + (num_idle > 0)))
    num_below = num_idle + sum(count < share for count in rivals)
    reserve = min(num_below * unit, -(-max_sessions // RESERVED_PART))
    within_share = held.get(key, 0) + num_wanted <= share
    return num_wanted <= num_free and (within_share or num_wanted <= num_free - reserve)
