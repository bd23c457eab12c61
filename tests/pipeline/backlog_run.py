"""A run that captures a backlog by Spark's tasks, for tests; also in a process of its own, to be killed.

`python -m tests.pipeline.backlog_run DSN FOLDER REMOTE` captures into `FOLDER/many.db` and
`FOLDER/many` until a failpoint ends it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr
from pyspark.sql.connect.session import SparkSession

from deltaforge_dagster.config.engine import SegmentLimits
from deltaforge_dagster.errors import SparkUnavailable
from deltaforge_dagster.pipeline.capture import backlog
from deltaforge_dagster.sources.mysql.config import MysqlSourceConfig
from deltaforge_dagster.sources.mysql.source import MysqlSource
from deltaforge_dagster.sources.mysql.stream import log_sections
from deltaforge_dagster.sources.stream import read_buffer
from deltaforge_dagster.state.store import StateStore
from tests.fix_spark import connected
from tests.pipeline.capturing import Stage

LIMITS = SegmentLimits(min_ms=0, max_ms=100, max_events=100)
SMALL = {
    f"{backlog.__name__}.WORTH_BYTES": 20 << 10,
    f"{backlog.__name__}.LOOK_BYTES": 4 << 10,
    f"{read_buffer.__name__}._LEAST_BUFFER_BYTES": 2 << 10,
    f"{read_buffer.__name__}.BUFFER_BYTES": 2 << 10,
    f"{log_sections.__name__}.BUFFER_BYTES": 2 << 10,
}
"""What makes a backlog of little log."""


@dataclass
class Sessions:
    """The one session of the tests, lent so many times."""

    spark: SparkSession
    limit: int = 1 << 30
    elsewhere: bool = False

    def session(self) -> SparkSession:
        """Return it."""
        if self.limit <= 0:
            raise SparkUnavailable("there is no Spark")
        self.limit -= 1
        return self.spark

    def lost(self, error: BaseException) -> bool:
        """Keep it, whatever happens."""
        del error
        return False


@dataclass
class _Bench:
    """A database that others write to."""

    dsn: str

    def source(self) -> MysqlSource:
        """Return a source as the bench of that database makes it."""
        name = urlsplit(self.dsn).path.removeprefix("/")
        tables = (f"{name}.orders", f"{name}.items")
        config = MysqlSourceConfig(id=f"{name}-db", dsn=SecretStr(self.dsn), tables=tables)
        return MysqlSource(config, "orders")


def main(dsn: str, folder: Path, remote: str) -> None:
    """Capture until killed."""
    for name, value in SMALL.items():
        module, _, attribute = name.rpartition(".")
        setattr(sys.modules[module], attribute, value)
    stage = Stage(_Bench(dsn), StateStore.open(f"sqlite:///{folder}/many.db"), folder / "many")
    spark = connected(remote)
    stage.capture(lambda _: False, LIMITS, sessions=Sessions(spark))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
