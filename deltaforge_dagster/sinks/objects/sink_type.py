"""Object files as a kind of sink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from deltaforge_dagster.sinks.objects.sink_type import S3SinkConfig
from deltaforge_dagster.sinks.registry import (
    ObjectSinkType,
    SinkContext,
    connect_seconds,
    folder_finding,
)
from deltaforge_dagster.sources.findings import Finding

if TYPE_CHECKING:  # they need Arrow
    from deltaforge_dagster.sinks.objects.writer import ObjectWriter
    from deltaforge_dagster.sinks.tables.staged import ObjectForm
    from deltaforge_dagster.sinks.tables.writer import TableOwner
    from deltaforge_dagster.typed_rows.schema import TargetTypes

_CLIENTS = {
    "s3": ("s3fs", "pip install 'deltaforge-dagster[s3]'"),
    "gs": ("gcsfs", "pip install gcsfs"),
    "az": ("adlfs", "pip install adlfs"),
}


class S3SinkType(ObjectSinkType[S3SinkConfig]):
    """Parquet or JSON lines in object storage, or in a local folder."""

    name = "s3"
    summary = "A sink of object files: it writes Parquet or JSON lines to object storage."
    config = S3SinkConfig
    destinations = "folders"
    owns = "folder"
    where = frozenset({"bucket", "prefix", "folder", "local", "endpoint"})
    form = frozenset({"format", "compression", "types"})
    timing = frozenset({"file_roll", "send_timeout_secs"})

    def column_types(self) -> TargetTypes:
        """Return what Parquet can have that every usual reader understands."""
        from deltaforge_dagster.typed_rows.schema import TargetTypes  # noqa: PLC0415 - needs Arrow

        return TargetTypes(unsigned=False, uuid=False)

    def object_form(self, config: S3SinkConfig) -> ObjectForm:
        """Return the form of the objects."""
        from deltaforge_dagster.sinks.tables.staged import ObjectForm  # noqa: PLC0415 - needs Arrow

        return ObjectForm(config.format, config.codec, config.period)

    def owned_place(self, config: S3SinkConfig) -> tuple[str, ...]:
        """Return the server and the bucket, or the root of local folders."""
        return (config.endpoint or "", "" if config.local else config.bucket.rpartition("://")[2])

    def build_writer(self, config: S3SinkConfig, owner: TableOwner) -> ObjectWriter:
        """Return what puts the objects of a sink into their place, not connected yet."""
        from deltaforge_dagster.sinks.objects.stores import open_store  # noqa: PLC0415 - fsspec
        from deltaforge_dagster.sinks.objects.writer import ObjectWriter  # noqa: PLC0415

        return ObjectWriter(config, owner, open_store(config))

    def problems(self, config: S3SinkConfig, context: SinkContext) -> list[str]:  # noqa: ARG002
        """Return that the client of the storage is not installed, if so."""
        if config.scheme is None:
            return []
        package, command = _CLIENTS[config.scheme]
        if find_spec(package) is not None:
            return []
        needs = f"{config.scheme}:// needs the package {package}, which is not installed: {command}"
        return [f"sink {config.id}: {needs}"]

    def metadata(self, config: S3SinkConfig) -> Mapping[str, str]:
        """Return where the objects are, and their format."""
        return {"objects": config.root, "format": config.extension}

    def preflight(
        self,
        config: S3SinkConfig,
        context: SinkContext,  # noqa: ARG002
        names: Sequence[str],  # noqa: ARG002
    ) -> list[Finding]:
        """Check, without writing, that the bucket can be reached or the folder can be written."""
        subject = f"sink {config.id}"
        if config.local:
            return [folder_finding(subject, Path(config.root), "objects", "correct the bucket")]
        from deltaforge_dagster.sinks.objects.stores import RemoteStore  # noqa: PLC0415 - fsspec

        RemoteStore(config, seconds=connect_seconds(config.send_timeout_secs)).check()
        return [
            Finding(subject, "ok", f"bucket {config.bucket} can be reached"),
            Finding(
                subject, "note", f"only a run shows whether objects may be put into {config.root}"
            ),
        ]


S3 = S3SinkType()
