"""Object files as a kind of sink, and their `config` in a pipeline file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    SecretStr,
    field_serializer,
    field_validator,
    model_validator,
)

from deltaforge_dagster.config.blocks import (
    TEMPLATE,
    Block,
    Count,
    Seconds,
    Text,
    environment_filled,
)
from deltaforge_dagster.config.secrets import SECRET_NAME, mask
from deltaforge_dagster.config.sinks import check_address
from deltaforge_dagster.config.templates import compile_template
from deltaforge_dagster.errors import SpecError, TableRejected
from deltaforge_dagster.sinks.tables.config import CommitWhen, StagedSinkConfig, may_be_folder

Period = Literal["year", "month", "day", "hour"]

PERIODS: Mapping[str, Period] = {
    "time.year": "year",
    "time.month": "month",
    "time.day": "day",
    "time.hour": "hour",
}
"""The time variables that a folder template may have, and the period that each distinguishes.

The longest period is first.
"""

_SOURCE = ("source.db", "source.schema", "source.table")
_SCHEME = re.compile(r"(s3|gs|az)://(.+)")

_CLIENTS = {
    "s3": ("s3fs", "pip install 'deltaforge-dagster[s3]'"),
    "gs": ("gcsfs", "pip install gcsfs"),
    "az": ("adlfs", "pip install adlfs"),
}


def _folder(text: str) -> str:
    try:
        template = compile_template(text)
    except SpecError as error:
        raise ValueError(str(error)) from error
    for variable in template.variables:
        name = ".".join(variable.path)
        if name not in _SOURCE and name not in PERIODS:
            raise ValueError(
                f"names ${{{name}}}, which is not known of an object's folder "
                "(only ${source.db}, ${source.schema}, ${source.table}, "
                "${time.year}, ${time.month}, ${time.day} and ${time.hour} are)"
            )
    parts = "".join(part if isinstance(part, str) else "x" for part in template.parts).split("/")
    if not all(may_be_folder(part) for part in parts):
        raise ValueError(
            "is not a folder (names with `/` between them, without `/` at the beginning or the end)"
        )
    return text


def _bucket(text: str) -> str:
    scheme, colon, rest = text.partition("://")
    if colon and not _SCHEME.fullmatch(text):
        raise ValueError(
            f"has the scheme {scheme}, but buckets are of s3://, gs:// or az:// (a folder: local: "
            "true, and its path)"
        )
    if colon and "/" in rest.rstrip("/"):
        raise ValueError("has a path (write it as `prefix`)")
    return text.rstrip("/") or text


def _prefix(text: str) -> str:
    text = environment_filled(text).strip("/")
    if text and not all(may_be_folder(part) for part in text.split("/")):
        raise ValueError("is not a folder (names with `/` between them)")
    return text


def _option(value: object) -> object:
    return environment_filled(value) if isinstance(value, str) else value


class FileRoll(Block):
    """When the objects of the waiting changes are written: at the first of these limits."""

    max_bytes: Count = 268_435_456
    """When their segments of the journal have so many bytes; an object is about as large, or
    smaller.
    """
    max_events: Count = 1_000_000
    """When there are so many."""
    max_age_secs: Seconds = 300.0
    """When the oldest has waited for so long."""
    idle_age_secs: Seconds = 600.0
    """When none has come for so long."""


class S3SinkConfig(StagedSinkConfig):
    """How to write object files."""

    destination_field = "folder"

    bucket: Annotated[Text, AfterValidator(_bucket)]
    """The bucket: its name (S3), or `s3://name`, `gs://name` (Google Cloud Storage) or `az://name`
    (a container of Azure Blob Storage). It must exist. With `local: true` the path of a folder.
    """
    prefix: Annotated[str, AfterValidator(_prefix)] = ""
    """The folder in the bucket that has everything."""
    folder: Annotated[str, AfterValidator(_folder), TEMPLATE] = (
        "table=${source.table}/year=${time.year}/month=${time.month}/day=${time.day}"
    )
    """Template of the folder, below `prefix`, that has an object.

    `${source.db}`, `${source.schema}` (the database in sources without schemas) and
    `${source.table}` are its table's; `${time.year}`, `${time.month}`, `${time.day}` and
    `${time.hour}` the time of its changes (UTC, by event time).
    """
    region: Text | None = None
    """The region of the bucket (S3)."""
    endpoint: Text | None = None
    """URL of a server that speaks the protocol of S3; without it, that of AWS."""
    access_key_id: SecretStr | None = None
    """Needs `secret_access_key`.

    Without both, they come from the environment, as AWS' own programs find them.
    """
    secret_access_key: SecretStr | None = None
    """The secret of the key."""
    virtual_hosted_style: bool = False
    """Whether the bucket is part of the host's name, not of the path (S3)."""
    local: bool = False
    """Whether `bucket` is the path of a local folder, which is created."""
    options: Mapping[str, Annotated[SecretStr, BeforeValidator(_option)]] = {}
    """Options of the client of [gcsfs](https://gcsfs.readthedocs.io) or
    [adlfs](https://github.com/fsspec/adlfs), such as `account_name` or `connection_string`. By
    default their clients find the credentials, as those of Google and Azure do.
    """
    format: Literal["parquet", "jsonl"] = "parquet"
    """`parquet`: a row per change, with typed columns of both row images
    ([object-files.md](object-files.md#parquet)). `jsonl`: a line per change, with its native event
    ([events.md](events.md)).
    """
    compression: Literal["snappy", "gzip", "zstd", "none"] = "snappy"
    """How objects are compressed. JSON lines are compressed with gzip in place of snappy."""
    file_roll: FileRoll = FileRoll()
    """When objects are written.

    Each has the changes of one table (and version), and of one day or what else `folder`
    distinguishes.
    """
    send_timeout_secs: Seconds = 60.0
    """How long a server of S3 may take to answer a request."""

    @property
    def root(self) -> str:
        """The URL of the folder that has everything; its path if it is local."""
        bucket = self.bucket if self.local or "://" in self.bucket else f"s3://{self.bucket}"
        return "/".join(part for part in (bucket, self.prefix) if part)

    @property
    def full_destination(self) -> str:
        """The template of the folder with `prefix`, and with the bucket if that is a folder."""
        parts = (self.bucket if self.local else "", self.prefix, self.folder)
        return "/".join(part for part in parts if part)

    @property
    def scheme(self) -> str | None:
        """The scheme of the bucket's URL, None for a local folder."""
        return None if self.local else urlsplit(self.root).scheme

    @property
    def codec(self) -> Literal["snappy", "gzip", "zstd", "none"]:
        """The compression that applies to the format."""
        lines = self.format == "jsonl" and self.compression == "snappy"
        return "gzip" if lines else self.compression

    @property
    def extension(self) -> str:
        """What the names of objects end with, without a dot at the beginning."""
        if self.format == "parquet":
            return "parquet"
        return {"gzip": "jsonl.gz", "zstd": "jsonl.zst"}.get(self.codec, "jsonl")

    @property
    def period(self) -> Period | None:
        """The shortest period that folders distinguish, None for none."""
        names = {".".join(variable.path) for variable in compile_template(self.folder).variables}
        return next(
            (PERIODS[variable] for variable in reversed(tuple(PERIODS)) if variable in names), None
        )

    @property
    def commit_when(self) -> CommitWhen:
        """When objects are written."""
        roll = self.file_roll
        return CommitWhen(roll.max_age_secs, roll.max_events, roll.max_bytes, roll.idle_age_secs)

    def variables(self, variables: Mapping[str, str]) -> Mapping[str, str]:
        """Return the variables of a table; its database is the schema if its source has none."""
        return (
            {"source.schema": variables["source.db"], **variables}
            if "source.db" in variables
            else variables
        )

    def name_of(self, database: str, schema: str | None, table: str) -> tuple[str, ...]:
        """Return schema (the database without schemas) and name of a table.

        Raises:
            TableRejected: One of them cannot be the name of a folder.
        """
        for part in (database, schema or database, table):
            if not may_be_folder(part):
                raise TableRejected(
                    f"sink {self.id}: {part!r} cannot be the name of a folder; do not capture the "
                    "table, or rename it"
                )
        return (schema or database, table)

    @model_validator(mode="after")
    def _check_place(self) -> S3SinkConfig:
        if self.local:
            if "://" in self.bucket or not Path(self.bucket).is_absolute():
                raise ValueError("bucket: must be the absolute path of a folder with `local: true`")
            misplaced = [
                name
                for name in ("region", "endpoint", "access_key_id", "secret_access_key", "options")
                if getattr(self, name)
            ]
            if misplaced:
                raise ValueError(f"{misplaced[0]}: has no meaning with `local: true` (remove one)")
            return self
        if "://" not in self.bucket and "/" in self.bucket:
            raise ValueError(
                "bucket: has a `/`, so it is no bucket's name (a local folder needs `local: true`, "
                "a folder in the bucket is `prefix`)"
            )
        if self.scheme == "s3" and self.options:
            raise ValueError(
                "options: are those of gs:// and az:// (S3 has endpoint, region, access_key_id ...)"
            )
        if self.scheme != "s3":
            misplaced = [
                name
                for name in ("region", "endpoint", "access_key_id", "secret_access_key")
                if getattr(self, name) is not None
            ]
            if misplaced:
                raise ValueError(f"{misplaced[0]}: is for S3 only (write it under `options`)")
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("access_key_id and secret_access_key need each other")
        return self

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, url: str | None) -> str | None:
        if url is None:
            return None
        check_address(url)
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.netloc:
            raise ValueError("is no URL (write http://host:port or https://host)")
        if parts.username or parts.password:
            raise ValueError("holds a login (write access_key_id and secret_access_key)")
        return url

    @field_validator("access_key_id", "secret_access_key")
    @classmethod
    def _check_secret(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and not environment_filled(secret.get_secret_value()).strip():
            raise ValueError("is empty")
        return secret

    @field_serializer("access_key_id", "secret_access_key")
    def _hide(self, secret: SecretStr | None) -> str | None:
        return None if secret is None else "***"

    @field_serializer("options")
    def _mask_options(self, options: Mapping[str, SecretStr]) -> dict[str, str]:
        return {
            name: "***" if SECRET_NAME.search(name) else mask(value.get_secret_value())
            for name, value in options.items()
        }


class S3SinkType(ObjectSinkType[S3SinkConfig]):
    """Parquet or JSON lines in object storage, or in a local folder."""

    name = "s3"
    sample: Mapping[str, Any] = {"bucket": "{{ env.LAKE_BUCKET }}", "prefix": "NAME"}
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
