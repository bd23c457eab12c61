"""Failpoints: named steps at which a test has the process die, so that timing does not matter.

`failpoint(name)` stands after each durable step of a run. It does nothing unless the environment
variable `DELTAFORGE_FAILPOINT` names that step:

=================================  ==========================================================
`segment-row-written`              the process ends itself with SIGKILL the first time
`segment-row-written:3`            the third time
`segment-row-written:3=stop`       the third time it stops itself (SIGSTOP) until SIGCONT
=================================  ==========================================================

Times are counted per process. SIGKILL runs no handler, flushes nothing and releases nothing,
which is what a crash does.
"""

from __future__ import annotations

import os
import re
import signal
import threading

from deltaforge_dagster.errors import SettingsError

VARIABLE = "DELTAFORGE_FAILPOINT"

FAILPOINTS = (
    "chunk-noted",  # a chunk of a snapshot was read, and the pipeline's run may take it over
    "parked-file-written",  # a file of parked events is durable, no row names it
    "parked-row-written",  # its row is committed, and the captured position has passed it
    "segment-file-written",  # the journal file is durable, its row does not exist
    "segment-row-written",  # the segment's row and the captured position are committed
    "processed-file-written",  # the processed segment's file is durable, no row names it
    "processed-noted",  # its row is committed, sinks may have it
    "segment-encoded",  # Spark has written the messages, nothing is sent
    "sink-sent",  # the sink acknowledged, its checkpoint has not moved
    "dead-letter-file-written",  # a change that is set aside is durable, it has no entry
    "dead-letter-written",  # it has its entry, the checkpoint has not passed it
    "redrive-sent",  # a dead letter was delivered, its entry is still there
    "redrive-written",  # its entry is gone
    "table-commit-planned",  # what a commit of tables covers is stored, nothing of it is written
    "table-commit-staged",  # its files are there, no table has them
    "table-pending-planned",  # it is stored that it goes to the pending changes of tables
    "table-pending-added",  # they contain it, and are still to be folded
    "lake-filled",  # rows of a table have the source's values in columns that were added
    "lake-fold-merged",  # the pending changes of a table are in the table as well
    "lake-fold-deleted",  # they are in the table only
    "table-committed",  # one of its tables has it
    "table-commit-complete",  # all tables have it, the front and the checkpoint have not moved
    "table-resync-begun",  # a table is suspended and its snapshot requested, it has the old rows
    "lake-pending-recreated",  # the table of its pending changes is empty
    "table-recreated",  # a table is empty, it is still suspended
    "checkpoint-written",  # the checkpoint moved, the source was not told
    "source-confirmed",  # the source was told how far it may discard its log
    "range-closed",  # the range is closed, nothing of it is published
    "range-published",  # its materialization is written, the `published` row is not
)
"""Every step, in the order of writes."""

_SETTING = re.compile(r"^(?P<name>[a-z-]+)(?::(?P<time>[1-9][0-9]*))?(?P<stop>=stop)?$")

_lock = threading.Lock()
_passed = dict.fromkeys(FAILPOINTS, 0)


def failpoint(name: str) -> None:
    """Die here if the environment says so; otherwise do nothing.

    Raises:
        SettingsError: `DELTAFORGE_FAILPOINT` names no step, or cannot be read.
        ValueError: `name` is not in `FAILPOINTS`.
    """
    if name not in FAILPOINTS:
        raise ValueError(f"{name!r} is not a failpoint; add it to FAILPOINTS")
    setting = os.environ.get(VARIABLE)
    if not setting:
        return
    parsed = _SETTING.match(setting)
    if parsed is None or parsed["name"] not in FAILPOINTS:
        raise SettingsError(
            f"{VARIABLE}={setting!r}: expected NAME, NAME:TIME or NAME:TIME=stop with a name of "
            f"{', '.join(FAILPOINTS)}"
        )
    with _lock:
        _passed[name] += 1
        time = _passed[name]
    if parsed["name"] == name and time == int(parsed["time"] or 1):
        os.kill(os.getpid(), signal.SIGSTOP if parsed["stop"] else signal.SIGKILL)
