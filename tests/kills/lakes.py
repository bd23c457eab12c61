"""Lake tables of the workload: where they are, what they have, and what they may have at any moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pyspark.errors import PySparkException
from pyspark.sql import Row as SparkRow

from tests.fix_spark import SparkAddress, connected
from tests.kills.ends import TABLE_STEPS, Row
from tests.kills.workload import EMPTIED, Change, Workload

Format = Literal["delta", "iceberg"]
Mode = Literal["current", "changelog", "history"]

_PLACES: Mapping[Format, str] = {
    "delta": "path: {folder}",
    "iceberg": "catalog_properties: {{type: hadoop, warehouse: {folder}}}",
}
_COMMITS: Mapping[Format, str] = {"delta": "_delta_log/*.json", "iceberg": "metadata/v*.metadata.json"}  # fmt: skip
"""Each commit to the table writes one such file; Iceberg gives it this name when it is complete."""
_OWN = "df_"
"""What the names of our own columns begin with."""


class LakeDestination:
    """A table in a folder of its own.

    Attributes:
        mode: What it has.
    """

    steps = TABLE_STEPS

    def __init__(self, format_: Format, mode: Mode, folder: Path, spark: SparkAddress) -> None:
        self.mode = mode
        self._format = format_
        self._folder = folder
        self._spark = spark

    def sink(self, *, exactly_once: bool) -> str:
        """Return the sink of the pipeline."""
        assert exactly_once
        place = _PLACES[self._format].format(folder=self._folder)
        return (
            f"{{type: {self._format}, config: {{id: sink, {place}, table: kills.items, "
            f"mode: {self.mode}, commit_seconds: 0.2}}}}"
        )

    def settle(self) -> None:
        """Wait for nothing: a table is what its last commit says."""

    def lengths(self) -> tuple[int, ...]:
        """Return the number of commits."""
        return (len(list(self._table.glob(_COMMITS[self._format]))),)

    def values(self) -> list[list[str | bytes]]:
        """Return nothing: `rows` has them."""
        raise NotImplementedError

    def rows(self) -> list[SparkRow]:
        """Return the rows of the table, in the order of the log; none before its first commit."""
        while True:
            try:
                return self._read()
            except PySparkException as error:
                if error.getCondition() != "DELTA_SCHEMA_CHANGE_SINCE_ANALYSIS":
                    raise
                # A run has renamed a column since the query was planned.

    def _read(self) -> list[SparkRow]:
        if not self._table.exists():
            return []
        session = connected(self._spark.remote)
        try:
            read = session.read.format(self._format).load(str(self._table))
            return sorted(read.collect(), key=lambda row: (row.df_position, row.df_ordinal))
        except PySparkException:
            if self.lengths() == (0,):  # a run is about to create it
                return []
            raise
        finally:
            session.stop()

    @property
    def _table(self) -> Path:
        return self._folder / "kills" / "items"


@dataclass
class Checker:
    """Compares a table with what the only writer has committed.

    Args:
        destination: The table.
        workload: The writer.
    """

    destination: LakeDestination
    workload: Workload
    _seen: int = 0

    def check_prefix(self) -> None:
        """Prove that the table is as it must be after some of the transactions, no fewer than when it was read last."""
        rows = self.destination.rows()
        found = _found(self.destination.mode, rows)
        last = self._seen
        for number, wanted in enumerate(self._states(found)):
            if number >= self._seen and wanted == found:
                self._seen = number
                return
            last = number
        raise AssertionError(
            f"{len(rows)} rows are not what there is after any of the transactions {self._seen} to {last}"
        )

    def check_all(self, source: Mapping[int, Row]) -> None:
        """Prove that the table has everything, column by column."""
        rows = self.destination.rows()
        found = _found(self.destination.mode, rows)
        (*_, wanted) = self._states(found)
        assert found == wanted
        if self.destination.mode == "changelog":
            return
        if self.destination.mode == "history":
            self._check_versions(rows)
            rows = [row for row in rows if row.df_is_current]
        assert {row.id: _without_own(row) for row in rows} == source

    def _check_versions(self, rows: list[SparkRow]) -> None:
        """Prove that a history has each image once, and that all but the valid ones have ended."""
        images = [(one.key, one.version) for one in self._changes() if one.op in {"c", "u"}]
        assert sorted((row.id, row.version) for row in rows) == sorted(images)
        assert all((row.df_valid_to is None) == row.df_is_current for row in rows)

    def _changes(self) -> Iterator[Change]:
        for transaction in self.workload.committed():
            yield from transaction.changes

    def _states(self, found: Any) -> Iterator[Any]:
        """Yield what `_found` must return at the beginning and after each transaction: one object, which changes.

        Where only the database knows the order of changes, that of what was found is taken.
        """
        log: list[Change] = []
        now: dict[int, int] = {}
        state: Any = log if self.destination.mode == "changelog" else now
        yield state
        for transaction in self.workload.committed():
            logged = [Change(one.key, one.version, one.op) for one in transaction.changes]
            if self.destination.mode == "changelog" and not transaction.ordered:
                here = found[len(log) : len(log) + len(logged)]
                logged = here if sorted(here) == sorted(logged) else logged
            log += logged
            for change in transaction.changes:
                if change == EMPTIED:
                    now.clear()
                elif change.op == "d":
                    del now[change.key]
                else:
                    now.pop(change.key if change.was is None else change.was, None)
                    now[change.key] = change.version
            yield state


def _found(mode: Mode, rows: list[SparkRow]) -> Any:
    """Return a changelog's changes, or the version of each row that there is now."""
    if mode == "changelog":
        return [
            EMPTIED if row.df_op == "t" else Change(row.id, row.version, row.df_op) for row in rows
        ]
    now = [row for row in rows if mode == "current" or row.df_is_current]
    assert len({row.id for row in now}) == len(now), "a key is there twice"
    return {row.id: row.version for row in now}


def _without_own(row: SparkRow) -> Row:
    return {name: value for name, value in row.asDict().items() if not name.startswith(_OWN)}
