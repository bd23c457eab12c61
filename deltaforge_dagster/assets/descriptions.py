"""The specs of a pipeline's assets: descriptions, owners, tags and metadata that the UI shows.

They must not contain secrets: only names and templates of destinations are taken from the pipeline
file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dagster as dg

from deltaforge_dagster.assets.names import (
    asset_key,
    changes_asset,
    dagster_name,
    group_name,
    lake_table_asset,
    maintenance_asset,
    own_asset,
    schemas_key,
    sink_asset,
    snapshot_key,
    source_table_asset,
    source_table_key,
)
from deltaforge_dagster.assets.translator import PipelineAsset, shown_spec
from deltaforge_dagster.config.file.load import BrokenPipeline, LoadedPipeline
from deltaforge_dagster.config.model import Metadata
from deltaforge_dagster.config.sinks import MessageSinkConfig, SinkBlock
from deltaforge_dagster.pipeline.control.catalog import AnyPipeline
from deltaforge_dagster.pipeline.control.closed_ranges import CHANGES
from deltaforge_dagster.pipeline.control.specs import CodeParts
from deltaforge_dagster.sinks.registry import sink_types
from deltaforge_dagster.sources.registry import source_types

if TYPE_CHECKING:
    pass


def asset_specs(loaded: LoadedPipeline, parts: CodeParts) -> list[dg.AssetSpec]:
    """Return the specs of `changes` and of each sink; `parts` are those of their code versions."""
    return [
        _changes(loaded, parts),
        *(_sink(loaded, sink, parts) for sink in loaded.spec.spec.sinks),
    ]


def snapshot_spec(loaded: LoadedPipeline) -> dg.AssetSpec:
    """Return the spec of the asset whose partitions are chunks of tables."""
    return _shown(
        own_asset(loaded.name, "snapshot"),
        description=(
            f"Rows of {_tables(loaded)} as of the time when they were read. One partition is one "
            "chunk of a table. It is missing until it is read; then the pipeline's run puts its "
            "rows into the journal, between changes, and delivers them.\n\n"
            "**Materialize** partitions to read these chunks again."
        ),
        kinds={_source_kind(loaded)},
        **_everywhere(loaded),
    )


def schemas_spec(loaded: LoadedPipeline) -> dg.AssetSpec:
    """Return the spec of the asset with tables as partitions and versions as materializations."""
    return _shown(
        own_asset(loaded.name, "schemas"),
        description=(
            f"Versions of {_tables(loaded)}: columns, types, keys, and what each version changed. "
            "One partition is one table.\n\n**Materialize** a table to approve its newest form, if "
            "that waits for approval (`on_schema_change: pause_table`)."
        ),
        kinds={_source_kind(loaded)},
        **_everywhere(loaded),
    )


def lake_table_spec(
    loaded: LoadedPipeline,
    sink: SinkBlock,
    table: tuple[str, str],
    destination: Sequence[str] | None,
    columns: dg.TableSchema | None,
) -> dg.AssetSpec:
    """Return the spec of a table of a sink; its name and columns are known once it is written.

    Args:
        loaded: The pipeline.
        sink: The sink.
        table: Schema and name of the source's table.
        destination: Name of the sink's table, if it is known.
        columns: Its columns, if they are known.
    """
    config, kind = sink.config, sink_types()[sink.type]
    name, source = ".".join(destination or ()), ".".join(table)
    named = f"Table `{name}`, " if name else "Table "
    metadata = {"dagster/column_schema": columns, "dagster/table_name": name}
    return _shown(
        lake_table_asset(loaded.name, config.id, table),
        deps=[
            asset_key(loaded.name, config.id),
            source_table_key(loaded.name, loaded.spec.spec.source.config.id, table),
        ],
        description=(
            f"{named}in which sink {config.id} keeps `{source}`. Each commit that reaches "
            "it is a materialization, whose data version is the position that the table has."
        ),
        kinds={kind.dagster_kind()},
        **_everywhere(loaded, config.id),
        metadata={
            **{name: value for name, value in metadata.items() if value},
            "source": source,
            **kind.metadata(config),
        },
    )


def source_table_spec(loaded: LoadedPipeline, table: tuple[str, str]) -> dg.AssetSpec:
    """Return the spec of a table of the source, given by schema and name.

    Only the application writes this table.
    """
    source = loaded.spec.spec.source.config.id
    return _shown(
        source_table_asset(loaded.name, source, table),
        description=(
            f"Table `{'.'.join(table)}` of source {source}, from which the changes are captured."
        ),
        kinds={_source_kind(loaded)},
        **_everywhere(loaded, source),
        metadata={"source": source},
    )


def maintenance_spec(loaded: LoadedPipeline, sink_id: str) -> dg.AssetSpec:
    """Return the spec of the asset whose materializations are maintenance of a sink's tables."""
    return _shown(
        maintenance_asset(loaded.name, sink_id),
        description=(
            f"Maintenance of the tables of sink {sink_id}: small files are compacted, old "
            "snapshots and files that no table uses are deleted. Observations of the tables show "
            "their figures before and afterwards.\n\n"
            "**Materialize** it to have the tables maintained now."
        ),
        **_everywhere(loaded, sink_id),
    )


def health_spec(pipeline: AnyPipeline) -> dg.AssetSpec:
    """Return the spec of the asset that represents a whole pipeline, loadable or not."""
    health = own_asset(pipeline.name, "health")
    if isinstance(pipeline, BrokenPipeline):
        return _shown(
            health,
            group_name="broken_pipeline_files",
            description=f"This pipeline file cannot be loaded:\n\n```\n{pipeline.error}\n```",
        )
    return _shown(
        health,
        deps=[
            asset_key(pipeline.name, CHANGES),
            *(asset_key(pipeline.name, sink.config.id) for sink in pipeline.spec.spec.sinks),
            schemas_key(pipeline.name),
            snapshot_key(pipeline.name),
        ],
        description=(
            f"The health of pipeline {pipeline.name}. The check `well` shows what "
            "`deltaforge status` shows: it fails while changes are not captured, a sink fails or "
            "changes are held."
        ),
        **_everywhere(pipeline),
    )


def _changes(loaded: LoadedPipeline, parts: CodeParts) -> dg.AssetSpec:
    spec = loaded.spec.spec
    chain = [processor.id for processor in spec.processors]
    return _shown(
        changes_asset(loaded.name),
        description=(
            f"Changes captured from {_tables(loaded)}, in log order. One partition is one range "
            "of the log, stored in the journal.\n\n**Materialize** partitions to verify that their "
            "files are unchanged and follow one another without a gap."
        ),
        kinds={_source_kind(loaded)},
        **_everywhere(loaded),
        code_version=parts.version(),
        metadata={
            "source": spec.source.config.id,
            "tables": _tables(loaded),
            **({"processors": ", ".join(chain)} if chain else {}),
        },
    )


def _sink(loaded: LoadedPipeline, sink: SinkBlock, parts: CodeParts) -> dg.AssetSpec:
    config, kind = sink.config, sink_types()[sink.type]
    return _shown(
        sink_asset(loaded.name, config.id),
        deps=[asset_key(loaded.name, CHANGES)],
        description=(
            f"Ranges that sink {config.id} has acknowledged: everything up to their end has "
            f"arrived at `{_readable(config.destination)}`.\n\n**Materialize** partitions "
            + (
                "to deliver them again, marked as a replay, or to have the sink catch up to them."
                if isinstance(config, MessageSinkConfig)
                else "to have the sink catch up to them."
            )
        ),
        kinds={kind.dagster_kind()},
        **_everywhere(loaded),
        code_version=parts.version(config.id),
        metadata={
            "destination": config.destination,
            **({"envelope": config.envelope.type} if isinstance(config, MessageSinkConfig) else {}),
            "delivery": "exactly once" if kind.exactly_once(config) else "at least once",
            "required": config.required,
            **kind.metadata(config),
        },
    )


def _shown(asset: PipelineAsset, **attributes: Any) -> dg.AssetSpec:
    """Return the spec of an asset with these attributes, as it is translated."""
    return shown_spec(replace(asset, spec=dg.AssetSpec(asset.spec.key, **attributes)))


def _readable(template: str) -> str:
    """Return a template as text for users, such as `cdc.<source.table>`.

    `${...}` would look like a variable that was not expanded.
    """
    return re.sub(r"\$\{([^}]*)\}", r"<\1>", template)


def _everywhere(loaded: LoadedPipeline, part: str | None = None) -> dict[str, Any]:
    """Return what all assets of a pipeline have in common: group, owners and tags.

    The pipeline's own assets are one group; the tables of its source and of each sink, which are
    many, have groups of their own.
    """
    group = loaded.spec.spec.engine.dagster.group or dagster_name(loaded.name)
    return {
        "group_name": group if part is None else group_name(group, part),
        "owners": owners(loaded.spec.metadata),
        "tags": tags(loaded.spec.metadata),
    }


def _source_kind(loaded: LoadedPipeline) -> str:
    return source_types()[loaded.spec.spec.source.type].dagster_kind()


def _tables(loaded: LoadedPipeline) -> str:
    return ", ".join(loaded.spec.spec.source.config.tables)


_NAMES = ("owner", "owners", "team")
_MAIL = re.compile(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,7}")
_TAG_KEY = re.compile(r"([A-Za-z0-9_.-]{1,63}/)?[A-Za-z0-9_.-]{1,63}")
_TAG_VALUE = re.compile(r"[A-Za-z0-9_.-]{0,63}")
_RESERVED = "dagster/"


def owners(metadata: Metadata) -> list[str]:
    """Return the owners of a pipeline's assets, in Dagster's format.

    An annotation or label called `owner`, `owners` or `team` is a comma-separated list of owners.
    An owner that is an email address is shown as it is, any other as a team.
    """
    texts = [
        block[name]
        for block in (metadata.annotations, metadata.labels)
        for name in _NAMES
        if name in block
    ]
    names = [name.strip() for text in texts for name in text.split(",")]
    return list(dict.fromkeys(_owner(name) for name in names if name.removeprefix("team:")))


def tags(metadata: Metadata) -> dict[str, str]:
    """Return the tags of a pipeline's assets: its tenant and its labels.

    The UI can filter by them.

    Labels that Dagster does not accept as tags are left out (values may have up to 63 letters,
    digits, `_`, `-`, `.`).
    """
    return {
        key: value
        for key, value in {**metadata.labels, "tenant": metadata.tenant}.items()
        if _TAG_KEY.fullmatch(key) and _TAG_VALUE.fullmatch(value) and not key.startswith(_RESERVED)
    }


def _owner(name: str) -> str:
    if name.startswith("team:") or _MAIL.fullmatch(name):
        return name
    return f"team:{name}"
