"""Makes ticks that find a problem fail, so that it is visible in Dagster's list of ticks.

The reason of a skipped tick is hidden behind a click, and a skipped tick looks like an idle one. A
failed tick is red in the list, on the timeline and in *Automation*, for as long as the problem
lasts; its error ends with the message.
"""

from __future__ import annotations

import dagster as dg

NOT_WELL = "NOT WELL: "
"""The beginning of the message of a tick that has found a problem."""


def red(skipped: dg.SkipReason) -> dg.SkipReason:
    """Return the skip reason, or fail the tick if the reason is a problem (`NOT_WELL`).

    Raises:
        dg.Failure: The tick fails, with this message.
    """
    message = str(skipped.skip_message)
    if message.startswith(NOT_WELL):
        raise dg.Failure(message, allow_retries=False)
    return skipped
