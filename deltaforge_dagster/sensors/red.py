"""Make ticks fail that find a problem, so that it is visible in Dagster's list of ticks.

The reason of a skipped tick is hidden behind a click, and a skipped tick looks like an idle one. A failed tick is
red in the list, on the timeline and in *Automation*, with its message, for as long as the problem lasts.
"""

from __future__ import annotations

import dagster as dg
from dagster._core.errors import DagsterUserCodeProcessError
from dagster_shared.error import SerializableErrorInfo

NOT_WELL = "NOT WELL: "
"""The beginning of the message of a tick that has found a problem."""


def red(skipped: dg.SkipReason) -> dg.SkipReason:
    """Return the skip reason, or fail the tick if the reason is a problem (`NOT_WELL`).

    Raises:
        DagsterUserCodeProcessError: The tick fails, with a message and without a stack trace.
    """
    message = str(skipped.skip_message)
    if not message.startswith(NOT_WELL):
        return skipped
    raise DagsterUserCodeProcessError(  # type: ignore[no-untyped-call]
        message,
        user_code_process_error_infos=[SerializableErrorInfo(message, [], "NotWell")],
    )
