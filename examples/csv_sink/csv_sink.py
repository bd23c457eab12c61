"""A kind of sink in a package of its own: it appends each message as a row to a CSV file."""

from __future__ import annotations

import csv
import io
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from deltaforge_dagster.config.blocks import TemplateText
from deltaforge_dagster.config.sinks import MessageSinkConfig
from deltaforge_dagster.errors import SinkRejected, SinkUnavailable
from deltaforge_dagster.sinks.registry import MessageSinkType, SinkContext
from deltaforge_dagster.sources.findings import Finding

if TYPE_CHECKING:  # Dagster's code servers load this module, and do without Arrow
    from deltaforge_dagster.sinks.base import SendGuard, SinkBatch

ROWS = 5_000
"""Rows written between two calls of the guard."""


class CsvSinkConfig(MessageSinkConfig):
    """How to write CSV files."""

    destination_field = "path"

    path: TemplateText
    """Template of a file's path. Its folder must exist, and have no variables."""


class CsvSink:
    """Appends rows `event_id,key,value,replay`; the last is the run of a replay, else empty.

    At least once: after an error or a crash, the whole batch is written again.
    """

    exactly_once = False
    takes_parts = False

    def __init__(self, sink_id: str, folder: Path) -> None:
        self._sink_id = sink_id
        self._folder = folder
        self._closed = threading.Event()
        self._closed.set()

    def open(self) -> None:
        """Begin."""
        if not self._folder.is_dir():
            raise SinkUnavailable(f"sink {self._sink_id}: there is no folder {self._folder}")
        self._closed.clear()

    def position(self) -> None:
        """Return None: the checkpoint decides what is sent."""

    def send(self, batch: SinkBatch, guard: SendGuard) -> int:
        """Append all messages, and return the last ordinal once they are on disk."""
        for start in range(0, batch.messages.num_rows, ROWS):
            guard()  # raises if this run may no longer send
            if self._closed.is_set():
                raise SinkUnavailable(f"sink {self._sink_id}: closed")
            rows = batch.messages.slice(start, ROWS).to_pylist()
            for destination in dict.fromkeys(row["destination"] for row in rows):
                text = io.StringIO(newline="")
                csv.writer(text, lineterminator="\n").writerows(
                    (row["event_id"], row["key"], row["value"], batch.replay)
                    for row in rows
                    if row["destination"] == destination
                )
                self._append(Path(destination), text.getvalue().encode())
        return cast("int", batch.messages.column("ordinal")[-1].as_py())

    def close(self) -> None:
        """End; a `send` of another thread ends after the rows that it is writing."""
        self._closed.set()

    def _append(self, path: Path, rows: bytes) -> None:
        if path.resolve().parent != self._folder:
            raise SinkRejected(f"sink {self._sink_id}: {path} is not in {self._folder}")
        try:
            with path.open("a+b") as file:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)  # a crash may have left half a row
                file.write(rows)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise SinkUnavailable(f"sink {self._sink_id}: {path}: {error.strerror}") from error


class CsvSinkType(MessageSinkType[CsvSinkConfig]):
    """CSV files."""

    name = "csv"
    summary = "A CSV sink: each message is a row of a file."
    config = CsvSinkConfig
    destinations = "files"
    where = frozenset({"path"})

    def build(self, config: CsvSinkConfig, context: SinkContext) -> CsvSink:  # noqa: ARG002
        """Return a sink, not yet open."""
        return CsvSink(config.id, Path(config.path).resolve().parent)

    def preflight(
        self,
        config: CsvSinkConfig,
        context: SinkContext,  # noqa: ARG002
        names: Sequence[str],  # noqa: ARG002
    ) -> list[Finding]:
        """Say whether the user may write in the folder."""
        folder, subject = Path(config.path).resolve().parent, f"sink {config.id}"
        if not os.access(folder, os.W_OK | os.X_OK):
            return [Finding(subject, "error", f"cannot write in {folder}", f"mkdir -p {folder}")]
        return [Finding(subject, "ok", f"files in {folder}")]


CSV = CsvSinkType()
