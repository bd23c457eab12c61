"""The engine's interface to Spark: the provider of sessions, and short names of Spark's errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # code servers load this module, but not PySpark
    from pyspark.errors import PySparkException

    from deltaforge_dagster.pipeline.spark_client import SparkSession


class SessionProvider(Protocol):
    """Provides the Spark session of a run."""

    @property
    def elsewhere(self) -> bool:
        """Whether the server is not our own, so that it may lack what the run needs."""
        ...

    def session(self) -> SparkSession:
        """Return the session, making one if there is none.

        Raises:
            SparkUnavailable: No server answers.
        """
        ...

    def lost(self, error: BaseException) -> bool:
        """Return whether `error` means that the session is gone.

        `session` then creates a new one.
        """
        ...


class RunSessions(SessionProvider, Protocol):
    """Provides the Spark session of a run, which is continued by the next run."""

    def close(self) -> None:
        """Cancel all calls to the server, also those of other threads, and refuse further ones.

        gRPC's threads do not survive the end of the interpreter, which would wait forever for a
        call that is still open then.
        """
        ...


def spark_condition(error: PySparkException) -> str:
    """Return a short name of an error: Spark's error condition, or the gRPC status code.

    The text of an error may quote a value of a row, so it is not used.
    """
    from deltaforge_dagster.pipeline.spark_client import (  # noqa: PLC0415 - see above
        SparkConnectGrpcException,
    )

    if condition := error.getCondition():
        return condition
    if isinstance(error, SparkConnectGrpcException):
        return str(error.getGrpcStatusCode().name)
    return type(error).__name__
