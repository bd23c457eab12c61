"""To which subjects a NATS user may publish, as far as the server tells without a message.

Newer servers answer `$SYS.REQ.USER.INFO` (nats-server, `events.go`), to users that may ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deltaforge_dagster.errors import PermissionMissing
from deltaforge_dagster.sinks.nats_link import Link
from deltaforge_dagster.sinks.nats_stream import fits, meet

USER_INFO = "$SYS.REQ.USER.INFO"


@dataclass(frozen=True, slots=True)
class Rights:
    """What a user may publish.

    Attributes:
        allow: Patterns of subjects, none for any subject.
        deny: Patterns of those that are left out.
    """

    allow: Sequence[str]
    deny: Sequence[str]

    def of(self, pattern: str) -> Literal["all", "some", "none"]:
        """Return to how many of the subjects that fit `pattern` the user may publish."""
        allowed = not self.allow or any(meet(one, pattern) for one in self.allow)
        if not allowed or any(fits(one, pattern) for one in self.deny):
            return "none"
        whole = not self.allow or any(fits(one, pattern) for one in self.allow)
        return "all" if whole and not any(meet(one, pattern) for one in self.deny) else "some"


def rights(link: Link, seconds: float) -> Rights | None:
    """Return what the user may publish; None when the server does not tell.

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
