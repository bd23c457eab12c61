"""Ticks that fail, so that the list of ticks shows red what keeps changes from being captured.

The reason of a tick that skips is hidden behind a click, and looks like that of an idle one. A tick that fails
is red in the list, on the timeline and in *Automation*, with the message, for as long as the problem lasts.
"""

from __future__ import annotations

import dagster as dg
from dagster._core.errors import DagsterUserCodeProcessError
from dagster_shared.error import SerializableErrorInfo

NOT_WELL = "NOT WELL: "
"""How the message of a tick begins that has found something wrong."""


def red(skipped: dg.SkipReason) -> dg.SkipReason:
    """Return why nothing is started, or fail the tick if that is something wrong.

    Raises:
        DagsterUserCodeProcessError: The tick fails, with a message and without a stack.
    """
    message = str(skipped.skip_message)
    if not message.startswith(NOT_WELL):
        return skipped
    raise DagsterUserCodeProcessError(  # type: ignore[no-untyped-call]
        message,
        user_code_process_error_infos=[SerializableErrorInfo(message, [], "NotWell")],
    )
