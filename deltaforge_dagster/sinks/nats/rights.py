"""Reads the subjects to which a NATS user may publish, without publishing anything.

Newer servers answer `$SYS.REQ.USER.INFO` (nats-server, `events.go`) if the user may publish to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deltaforge_dagster.errors import PermissionMissing
from deltaforge_dagster.sinks.nats.link import NatsLink
from deltaforge_dagster.sinks.nats.stream import fits, meet

USER_INFO = "$SYS.REQ.USER.INFO"


@dataclass(frozen=True, slots=True)
class Rights:
    """The subjects to which a user may publish.

    Attributes:
        allow: Patterns of allowed subjects; empty if all are allowed.
        deny: Patterns of denied subjects, which override `allow`.
    """

    allow: Sequence[str]
    deny: Sequence[str]

    def of(self, pattern: str) -> Literal["all", "some", "none"]:
        """Return whether the user may publish to all, some or none of the subjects of `pattern`."""
        allowed = not self.allow or any(meet(rule, pattern) for rule in self.allow)
        if not allowed or any(fits(rule, pattern) for rule in self.deny):
            return "none"
        whole = not self.allow or any(fits(rule, pattern) for rule in self.allow)
        return "all" if whole and not any(meet(rule, pattern) for rule in self.deny) else "some"


def rights(link: NatsLink, seconds: float) -> Rights | None:
    """Return the subjects to which the user may publish, or None if the server does not tell.

    Raises:
        SinkUnavailable: The server does not answer.
    """
    try:
        answer = link.request(USER_INFO, None, seconds)
    except PermissionMissing:
        return None
    data = answer.get("data")
    if not isinstance(data, dict):
        return None
    publish = (data.get("permissions") or {}).get("publish") or {}
    return Rights(tuple(publish.get("allow") or ()), tuple(publish.get("deny") or ()))
