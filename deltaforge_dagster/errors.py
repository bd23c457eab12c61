"""The hierarchy of errors; the package deliberately raises no others.

::

    DeltaforgeError
    ├── Retryable                 the same call may succeed later: wait and try again
    │   ├── SourceUnavailable     the source's server cannot be reached, or closed the connection
    │   ├── SinkUnavailable       a sink cannot be reached, timed out, or rejects data temporarily
    │   ├── SinkOverdue           a sink took longer for a batch than the pipeline file allows
    │   ├── PositionMoved         a sink's own position is not where this sender left it
    │   ├── SparkUnavailable      the Spark server or its session is gone
    │   └── StoreUnavailable      the state store or the journal cannot be reached
    └── Terminal                  a retry fails until a person changes something
        ├── SpecError             a pipeline file is invalid (lists every problem found)
        ├── SettingsError         the installation is misconfigured
        ├── AuthFailed            a server rejected the credentials
        ├── PermissionMissing     a server denied an action; the message names the missing grant
        ├── SourceMisconfigured   the source's server lacks a required setting
        ├── PositionLost          the log no longer contains the required position
        ├── UnsupportedEvent      a log event or type that this version cannot decode
        ├── CorruptLog            log bytes that do not follow their format
        ├── JournalDamaged        a journal file is missing or differs from its checksum
        ├── ProcessorFailed       a processor failed on a batch, or exceeded a limit
        ├── SinkRejected          a sink rejects what it gets, or cannot continue from its own data
        │   ├── Undeliverable     one message can never be delivered; the others can
        │   └── TableRejected     one table of a sink cannot be written; the others can
        ├── LeaseLost             another run holds the lease now; this one must stop
        │   └── StoreLost         the state store's file is gone, and every lease with it
        └── NotAllowed            the request is invalid now (an open range, an unknown name)
            └── SensingDisabled   the pipeline's file does not enable the sensing that is asked for

Messages say what is wrong, where, and what to do next. They never contain a secret or a value of a
row. Errors are built from plain strings, so they can be pickled between processes.

Commands and statements that fix a problem are its *remedy*. They are kept as data, and messages are
rendered from them, so that programs get the same commands that people read.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AuthFailed",
    "Commands",
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
    "TableRejected",
    "Terminal",
    "Undeliverable",
    "UnsupportedEvent",
    "and_run",
    "commands_of",
]

Commands = tuple[str, ...]
"""Commands, or statements for a server, to run one after the other as they stand."""

_NAMED = 10


def commands_of(remedy: str | Sequence[str] | None) -> Commands:
    """Return a remedy as the commands that it consists of."""
    if remedy is None:
        return ()
    return (remedy,) if isinstance(remedy, str) else tuple(remedy)


def and_run(text: str, remedy: str | Sequence[str] | None) -> str:
    """Append `; run: <commands>` to a text: the first ten commands, and the number of the others.

    Without commands, return the text unchanged.
    """
    commands = commands_of(remedy)
    if not commands:
        return text
    more = len(commands) - _NAMED
    shown = "; ".join(commands[:_NAMED]) + (f"; and {more} more like these" if more > 0 else "")
    return f"{text}; run: {shown}"


class DeltaforgeError(Exception):
    """Base class of all errors that this package raises deliberately.

    Attributes:
        kind: Label of the error class in metrics (`auth`, `connect`, `checkpoint`, ...).
        acknowledged: Set by a sink that acknowledges parts of a batch: everything up to this
            ordinal of the batch that failed was delivered.
        remedy: The commands that fix the problem; empty if the text says what to do.
    """

    kind = "other"
    acknowledged: int | None = None
    remedy: Commands = ()

    def __init__(self, *args: object, remedy: str | Sequence[str] | None = None) -> None:
        super().__init__(*args)
        self.remedy = commands_of(remedy)

    @property
    def text(self) -> str:
        """What is wrong, without the commands that fix it."""
        return super().__str__()

    def __str__(self) -> str:
        return and_run(self.text, self.remedy)


class Retryable(DeltaforgeError):  # noqa: N818 - the name tells how to react
    """The same call may succeed later.

    Attributes:
        retry_after: Seconds after which the server asked to be called again; None if it did not.
    """

    kind = "io"
    retry_after: float | None = None


class Terminal(DeltaforgeError):  # noqa: N818 - the name tells how to react
    """The same call fails again until a person changes something."""


class SourceUnavailable(Retryable):
    """The source's server cannot be reached, or it closed the connection."""

    kind = "connect"


class StartDelayed(SourceUnavailable):
    """The server is still creating what the pipeline starts from, because it waits for others.

    PostgreSQL creates a replication slot only once the transactions that are open have ended.
    """


class SinkUnavailable(Retryable):
    """A sink cannot be reached, timed out, or rejects data temporarily."""

    kind = "connect"


class SinkOverdue(Retryable):
    """A sink took longer for a batch than the pipeline file allows."""

    kind = "backpressure"


class PositionMoved(Retryable):
    """A sink's own position is not where this sender left it, so nothing more may be sent.

    Another sender moved it, or the sink lost data. Open the sink again, read its position, and
    decide from it where to continue.
    """

    kind = "checkpoint"


class SparkUnavailable(Retryable):
    """The Spark server or its session is gone."""

    kind = "connect"


class StoreUnavailable(Retryable):
    """The state store or the journal cannot be reached."""

    kind = "connect"


class SpecError(Terminal):
    """A pipeline file is invalid.

    Attributes:
        problems: Every problem found, one line each, with file and path in the document.
    """

    kind = "incompatible"

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    @property
    def text(self) -> str:
        """The problems."""
        return "\n".join(self.problems)


class SettingsError(Terminal):
    """The installation (environment variables, state URL, journal URL) is misconfigured."""

    kind = "incompatible"


class AuthFailed(Terminal):
    """A server rejected the credentials."""

    kind = "auth"


class PermissionMissing(Terminal):
    """A server denied an action; the message names the missing grant."""

    kind = "permission"


class SourceMisconfigured(Terminal):
    """The source's server lacks a required setting; the message has the statement that sets it."""

    kind = "incompatible"


class PositionLost(Terminal):
    """The source's log no longer contains the required position."""

    kind = "checkpoint"


class UnsupportedEvent(Terminal):
    """A log event or type that this version cannot decode; the message says which, and where."""

    kind = "schema"


class CorruptLog(Terminal):
    """Log bytes do not follow their format."""

    kind = "schema"


class JournalDamaged(Terminal):
    """A journal file is missing, or it differs from its checksum."""

    kind = "checkpoint"


class ProcessorFailed(Terminal):
    """A processor failed on a batch, or exceeded a limit; no row of the batch is passed on."""

    kind = "processor"


class SinkRejected(Terminal):
    """A sink rejects what it is sent, or cannot continue from its own data."""


class Undeliverable(SinkRejected):
    """One message can never be delivered, however often it is retried; the others can.

    Attributes:
        ordinal: The ordinal of the message's change in its segment.
        cause: `routing` (there is no destination, or its name is invalid), `serialization` (the
            change cannot be converted to a message, or the destination refuses its content) or
            `too_large`.
        detail: The destination's own words, which may quote values of the row. Only dead letters
            show them.
    """

    def __init__(self, message: str, ordinal: int, cause: str, detail: str = "") -> None:
        super().__init__(message, ordinal, cause, detail)
        self.ordinal = ordinal
        self.cause = cause
        self.detail = detail

    @property
    def text(self) -> str:
        """What is wrong, without the destination's own words."""
        return str(self.args[0])


class TableRejected(SinkRejected):
    """One table of a sink cannot be written until somebody changes something; the others can."""


class LeaseLost(Terminal):
    """Another run holds the lease now, or may hold it; this one must not write any more."""

    kind = "cancelled"


class StoreLost(LeaseLost):
    """The state store's file was removed or replaced in use, so this process's writes are lost."""


class NotAllowed(Terminal):
    """The request is invalid now: an open range, an unknown pipeline, sink or range."""

    kind = "not_found"


class SensingDisabled(NotAllowed):
    """The pipeline's file does not enable the schema sensing that the request asks for."""
