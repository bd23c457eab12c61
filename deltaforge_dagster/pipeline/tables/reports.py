"""Carries the reports of Spark's tasks to the run: a few numbers and paths, or an error.

A task reports an error as a result and never fails with it: Spark would log and show the error's
text, which may quote a value of a row.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from deltaforge_dagster import errors
from deltaforge_dagster.errors import DeltaforgeError

REPORT = "report string, data binary, error string, text string"
"""A row for each report: JSON and its bytes, or class and text of the task's error."""

_COLUMNS: Mapping[str, pa.DataType] = {
    "report": pa.string(), "data": pa.binary(), "error": pa.string(), "text": pa.string(),
}  # fmt: skip
_REPORT = pa.schema(_COLUMNS)


@dataclass(frozen=True, slots=True)
class TaskReport:
    """A report of a task.

    Attributes:
        fields: Values of JSON.
        data: Bytes that belong to them.
    """

    fields: dict[str, Any]
    data: bytes = b""


def run_tasks(
    numbers: Iterable[pa.RecordBatch], run: Callable[[int], Iterable[TaskReport]]
) -> Iterator[pa.RecordBatch]:
    """Run the tasks with these numbers; called by Spark.

    Args:
        numbers: The numbers, in the first column.
        run: Runs a task.

    Yields:
        Columns of `REPORT`.
    """
    for batch in numbers:
        for number in batch.column(0).to_numpy().tolist():
            try:
                rows = [_row(report) for report in run(number)]
            except DeltaforgeError as error:
                rows = [{"error": type(error).__name__, "text": str(error)}]
            except Exception as error:  # noqa: BLE001 - its text may quote a value of a row
                text = f"staging broke: {type(error).__name__} in {_code_location(error)}"
                rows = [{"error": DeltaforgeError.__name__, "text": text}]
            if rows:
                yield pa.RecordBatch.from_pylist(rows, _REPORT)


def reported(report: pa.Table | pa.RecordBatch) -> list[TaskReport]:
    """Return what tasks have reported.

    Raises:
        DeltaforgeError: The error of a task.
    """
    rows = report.to_pylist()
    for row in rows:
        if row["error"] is not None:
            raise getattr(errors, row["error"])(row["text"])
    return [TaskReport(json.loads(row["report"]), row["data"] or b"") for row in rows]


def _code_location(error: Exception) -> str:
    """Return where in this package an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if "deltaforge_dagster" in frame.filename]
    return (
        f"{own_frames[-1].name}, line {own_frames[-1].lineno} "
        f"of {Path(own_frames[-1].filename).name}"
    )


def _row(report: TaskReport) -> dict[str, Any]:
    return {"report": json.dumps(report.fields), "data": report.data}
