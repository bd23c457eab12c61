"""One tree of errors; the whole package raises nothing else on purpose.

::

    DeltaforgeError
    ├── Retryable                 the same call may succeed later: wait and try again
    │   ├── SourceUnavailable     the source's server cannot be reached, or cut the connection
    │   ├── SinkUnavailable       a sink cannot be reached, timed out, or refused for now
    │   ├── SinkOverdue           a sink took longer for a batch than the pipeline file allows
    │   ├── PositionMoved         a sink's own position is not where this sender left it
    │   ├── SparkUnavailable      the Spark server or its session is gone
    │   └── StoreUnavailable      the state store or the journal cannot be reached
    └── Terminal                  nothing changes until a person acts
        ├── SpecError             a pipeline file is wrong (carries every problem found)
        ├── SettingsError         the installation is configured wrongly
        ├── AuthFailed            a server refused our credentials
        ├── PermissionMissing     a server refused an action; the message names the grant
        ├── SourceMisconfigured   the source's server lacks a setting we need
        ├── PositionLost          the log no longer holds the position we need
        ├── UnsupportedEvent      a log event or type this version does not decode
        ├── CorruptLog            log bytes that do not follow their format
        ├── JournalDamaged        a journal file is missing or differs from its checksum
        ├── ProcessorFailed       a processor broke on a batch, or met a limit
        ├── SinkRejected          a sink refuses what it is sent, or cannot go on with what it holds
        │   └── Undeliverable     one message can never be delivered; the others can
        ├── LeaseLost             another run holds the pipeline now; this one must stop
        │   └── StoreLost         the state store's file is gone, and every lease with it
        └── NotAllowed            the request makes no sense now (an open range, an unknown name)
            └── SensingDisabled   the pipeline's file does not ask for what sensing would know

Messages say what and where, and what to do next. They never contain a secret or a value of a
row. Errors are built from plain strings, so they survive pickling between processes.
"""

from __future__ import annotations

__all__ = [
    "AuthFailed",
    "CorruptLog",
    "DeltaforgeError",
    "JournalDamaged",
    "LeaseLost",
    "NotAllowed",
    "PermissionMissing",
    "PositionLost",
    "PositionMoved",
    "ProcessorFailed",
    "Retryable",
    "SensingDisabled",
    "SettingsError",
    "SinkOverdue",
    "SinkRejected",
    "SinkUnavailable",
    "SourceMisconfigured",
    "SourceUnavailable",
    "SparkUnavailable",
    "SpecError",
    "StoreLost",
    "StoreUnavailable",
    "Terminal",
    "Undeliverable",
    "UnsupportedEvent",
]


class DeltaforgeError(Exception):
    """Base of everything this package raises on purpose.

    Attributes:
        kind: Label of the error class in metrics (`auth`, `connect`, `checkpoint`, ...).
    """

    kind = "other"


class Retryable(DeltaforgeError):  # noqa: N818 - names what to do, not what went wrong
    """The same call may succeed later."""

    kind = "io"


class Terminal(DeltaforgeError):  # noqa: N818 - names what to do, not what went wrong
    """The same call fails again until a person changes something."""


class SourceUnavailable(Retryable):
    """The source's server cannot be reached, or it cut the connection."""

    kind = "connect"


class SinkUnavailable(Retryable):
    """A sink cannot be reached, timed out, or refused for now."""

    kind = "connect"


class SinkOverdue(Retryable):
    """A sink took longer for a batch than the pipeline file allows."""

    kind = "backpressure"


class PositionMoved(Retryable):
    """A sink's own position is not where this sender left it: nothing may be sent after it blindly.

    Another sender moved it, or the sink lost data. Open the sink again, read the position, and
    decide anew where to go on.
    """

    kind = "checkpoint"


class SparkUnavailable(Retryable):
    """The Spark server or its session is gone."""

    kind = "connect"


class StoreUnavailable(Retryable):
    """The state store or the journal cannot be reached."""

    kind = "connect"


class SpecError(Terminal):
    """A pipeline file is wrong.

    Attributes:
        problems: Every problem found, one line each, with file and path in the document.
    """

    kind = "incompatible"

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class SettingsError(Terminal):
    """The installation (environment variables, state URL, journal URL) is configured wrongly."""

    kind = "incompatible"


class AuthFailed(Terminal):
    """A server refused our credentials."""

    kind = "auth"


class PermissionMissing(Terminal):
    """A server refused an action; the message names the grant that is missing."""

    kind = "permission"


class SourceMisconfigured(Terminal):
    """The source's server lacks a setting we need; the message names the statement."""

    kind = "incompatible"


class PositionLost(Terminal):
    """The source's log no longer holds the position we need."""

    kind = "checkpoint"


class UnsupportedEvent(Terminal):
    """A log event or type that this version does not decode; named with its position."""

    kind = "schema"


class CorruptLog(Terminal):
    """Log bytes do not follow their format."""

    kind = "schema"


class JournalDamaged(Terminal):
    """A journal file is missing, or it differs from its checksum."""

    kind = "checkpoint"


class ProcessorFailed(Terminal):
    """A processor broke on a batch, or met a limit: nothing of the batch goes on."""

    kind = "processor"


class SinkRejected(Terminal):
    """A sink refuses what it is sent, or cannot go on with what it holds."""


class Undeliverable(SinkRejected):
    """One message can never be delivered, however often it is tried; the others can.

    Attributes:
        ordinal: Of the message's change in its segment.
        cause: What the destination does not take: `routing` (no destination, or a name that is none),
            `serialization` (the change cannot become a message) or `too_large`.
    """

    def __init__(self, message: str, ordinal: int, cause: str) -> None:
        super().__init__(message, ordinal, cause)
        self.ordinal = ordinal
        self.cause = cause

    def __str__(self) -> str:
        return str(self.args[0])


class LeaseLost(Terminal):
    """Another run holds the pipeline now, or may: this one must write nothing more."""

    kind = "cancelled"


class StoreLost(LeaseLost):
    """The state store's file was removed or replaced under this process: nothing it writes lasts."""


class NotAllowed(Terminal):
    """The request makes no sense now: an open range, an unknown pipeline, sink or range."""

    kind = "not_found"


class SensingDisabled(NotAllowed):
    """The pipeline's file does not ask for what sensing would know."""
