"""The column lineage of lake tables: their columns of the source, as far as these are certain.

A column is the source's column of the same name, unless a rule or a processor makes something else
of it. So there is no lineage of columns that a rule masks or a processor computes, and none at all
behind a processor whose effect on rows is not known from the pipeline file, such as a script.
"""

from __future__ import annotations

import dagster as dg

from deltaforge_dagster.assets.names import source_table_key
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.model import Spec
from deltaforge_dagster.config.processors import FilterProcessor, SqlProcessor
from deltaforge_dagster.errors import SourceMisconfigured
from deltaforge_dagster.sources.registry import parse_position
from deltaforge_dagster.sources.rows.columns import MASK, ColumnRules
from deltaforge_dagster.state.lake_commits import TableWrite
from deltaforge_dagster.state.schemas import TableHistory
from deltaforge_dagster.tables import TableSchema


def column_lineage(
    loaded: LoadedPipeline, history: TableHistory, write: TableWrite
) -> dg.TableColumnLineage | None:
    """Return the lineage of a lake table's columns after a commit, None if nothing is certain.

    Columns that the source's table did not have at the end of the commit have none.

    Args:
        loaded: The pipeline.
        history: The versions of the source's table.
        write: The commit.
    """
    version = history.at_position(parse_position(write.position))
    computed = _computed(loaded.spec.spec)
    if version is None or computed is None:
        return None
    masked = _masked(loaded.spec.spec, version.table)
    if masked is None:
        return None
    # Spark compares names without case, so a table may have kept an earlier spelling.
    names = {column.name.lower(): column.name for column in version.table.columns}
    certain = {name: names[name] for name in names.keys() - computed - masked}
    source = source_table_key(loaded.name, loaded.spec.spec.source.config.id, write.source)
    dependencies = {
        name: [dg.TableColumnDep(source, certain[name.lower()])]
        for name, _ in write.columns
        if name.lower() in certain
    }
    return dg.TableColumnLineage(dependencies) if dependencies else None


def _computed(spec: Spec) -> set[str] | None:
    """Return the lower-case names of the columns that processors compute; None if any may be."""
    computed: set[str] = set()
    for processor in spec.processors:
        if isinstance(processor, SqlProcessor):
            computed |= {target.partition(".")[2].lower() for target in processor.set}
        elif not isinstance(processor, FilterProcessor):
            return None
    return computed


def _masked(spec: Spec, table: TableSchema) -> set[str] | None:
    """Return the lower-case names of the columns that rules mask; None if rules do not fit."""
    try:
        rules = ColumnRules(spec.engine.columns).of(table)
    except SourceMisconfigured:
        return None
    ruled = zip(table.columns, rules or (), strict=False)
    return {column.name.lower() for column, rule in ruled if rule.action == MASK}
