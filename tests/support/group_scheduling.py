"""How pytest-xdist hands out tests: group by group.

Its own groups are of no use with pytest 9.2: they stand in ids that pytest reads no more, and each test would go to
whichever worker is free.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

from tests.support.groups import group_of


class GroupScheduling(LoadScopeScheduling):
    """Hands out the tests of a group together."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
