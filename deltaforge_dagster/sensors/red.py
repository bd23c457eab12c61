"""Ticks that fail, so that the list of ticks shows red what keeps changes from being captured.

The reason of a tick that skips is hidden behind a click, and looks like that of an idle one. A tick that fails
is red in the list, on the timeline and in *Automation*, with the message. Dagster's daemon also logs a stack
of its own for it, so a problem that lasts fails one tick a minute, and the others skip.
"""

from __future__ import annotations

import time

import dagster as dg
from dagster._core.errors import DagsterUserCodeProcessError
from dagster_shared.error import SerializableErrorInfo

NOT_WELL = "NOT WELL: "
"""How the message of a tick begins that has found something wrong."""

_AGAIN_SECONDS = 60.0

_failed: dict[str, tuple[str, float]] = {}
"""By sensor: what its last tick that failed said, and when (monotonic)."""


def red(sensor: str, skipped: dg.SkipReason) -> dg.SkipReason:
    """Return why nothing is started, or fail the tick if that is something wrong which is to be seen.

    Raises:
        DagsterUserCodeProcessError: The tick fails, with a message and without a stack.
    """
    message = str(skipped.skip_message)
    if not message.startswith(NOT_WELL):
        _failed.pop(sensor, None)
        return skipped
    # Numbers in a message may change with each tick, as seconds do.
    kind = "".join(one for one in message if not one.isdigit())
    before = _failed.get(sensor)
    now = time.monotonic()
    if before is not None and before[0] == kind and now - before[1] < _AGAIN_SECONDS:
        return skipped
    _failed[sensor] = kind, now
    raise DagsterUserCodeProcessError(  # type: ignore[no-untyped-call]
        message,
        user_code_process_error_infos=[SerializableErrorInfo(message, [], "NotWell")],
    )
