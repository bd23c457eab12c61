"""Stages commits of object files: a Spark task writes the objects' content (`object_files`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.errors import TableRejected
from deltaforge_dagster.journal.files import Journal
from deltaforge_dagster.pipeline.encode import files as encoded_files
from deltaforge_dagster.pipeline.encode.messages import Share, source_origin
from deltaforge_dagster.pipeline.run_context import SessionProvider
from deltaforge_dagster.pipeline.tables.commit_stager import CommitFiles, CommitStager
from deltaforge_dagster.pipeline.tables.object_files import ObjectFile, ObjectJob, ObjectPlan
from deltaforge_dagster.pipeline.tables.typed_files import TableName
from deltaforge_dagster.sinks.tables.config import StagedSinkConfig
from deltaforge_dagster.sinks.tables.staged import (
    ChangePlace,
    ObjectForm,
    StagedCommit,
    StagedStep,
    StagedTable,
)
from deltaforge_dagster.state.records import SegmentRow
from deltaforge_dagster.state.store import StateStore
from deltaforge_dagster.typed_rows.schema import TargetTypes


class ObjectStager(CommitStager[StagedSinkConfig]):
    """Stages commits of a sink of object files.

    Args:
        form: The form of the objects. For the others see `CommitStager`.
    """

    def __init__(  # noqa: PLR0917 - what a run has
        self,
        spec: PipelineSpec,
        config: StagedSinkConfig,
        types: TargetTypes,
        journal: Journal,
        sessions: SessionProvider,
        store: StateStore,
        run_id: str,
        form: ObjectForm,
    ) -> None:
        super().__init__(spec, config, types, journal, sessions, store, run_id)
        self._form = form

    def _staged(
        self, segments: Sequence[SegmentRow], wants: Callable[[TableName], bool], job: CommitFiles
    ) -> StagedCommit:
        plan = self._plan(segments, wants)
        shares = [Share(segment.path, None, 0, 1) for segment in segments]
        work = ObjectJob(self._journal.url, plan, shares, job.folder, job.name)
        label = f"segments {segments[0].segment} to {segments[-1].segment}"
        files = [ObjectFile.of_report(report) for report in self._run(work.run, 1, label)]
        failed: dict[tuple[str, ...], Exception] = {}
        by_name: dict[TableName, list[ObjectFile]] = {}
        for file in sorted(files, key=_first_place):
            destination, problem = self._destination(file.table)
            if file.error is not None or problem is not None:
                failed[destination] = problem or TableRejected(str(file.error))
            else:
                by_name.setdefault(file.table, []).append(file)
        tables = [self._table(name, table_files, plan) for name, table_files in by_name.items()]
        return StagedCommit(tables, failed, job.discard)

    def _table(self, name: TableName, files: Sequence[ObjectFile], plan: ObjectPlan) -> StagedTable:
        newest = files[-1]
        columns = plan.schema(name, newest.part.version).with_added(newest.added)
        destination, _ = self._destination(name)
        steps = [_step(file) for file in files]
        changes = sum(file.rows for file in files)
        return StagedTable(destination, name, columns, (), frozenset(), steps, changes)

    def _plan(
        self, segments: Sequence[SegmentRow], wants: Callable[[TableName], bool]
    ) -> ObjectPlan:
        chosen, skipped = self._versions(segments, wants)
        schemas = {
            name: {
                version.stamp.fingerprint: self._typed_schema(version.table)
                for version in used.versions
            }
            for name, used in chosen.items()
        }
        declared = {full: self._declared(types) for full, types in self._config.types.items()}
        return ObjectPlan(
            form=self._form,
            selection=self._selection,
            origin=source_origin(self._spec),
            schemas=schemas,
            declared=declared,
            unknown=self._declared({}),
            skipped=skipped,
        )


def _first_place(file: ObjectFile) -> ChangePlace:
    assert file.first is not None
    return file.first


def _step(file: ObjectFile) -> StagedStep:
    assert file.path is not None
    assert file.last is not None
    path = encoded_files.spark_path(file.path)
    return StagedStep("rows", [path], file.rows, inserts_only=True, last=file.last, part=file.part)
