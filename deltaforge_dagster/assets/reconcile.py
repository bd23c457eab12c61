"""The check `reconciled` of each table of a sink, and the job that compares the tables.

*Execute* of the check compares one table, the job all of them. Nothing is repaired unless the run's
configuration says so. A check has the numbers of the comparison and its whole report; so has an
observation of the table's asset, because Dagster plots numbers of assets, not of checks.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import dagster as dg
from pydantic import Field

from deltaforge_dagster.assets.lake_tables import KnownTable
from deltaforge_dagster.assets.names import PIPELINE_TAG, dagster_name, lake_table_key
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.dagster_private import UnresolvedAssetJobDefinition
from deltaforge_dagster.errors import DeltaforgeError, NotAllowed
from deltaforge_dagster.resources.platform import Opened, Platform, build_source

if TYPE_CHECKING:  # code servers load this module, but not what compares tables
    from deltaforge_dagster.pipeline.reconcile.reports import TableReport
    from deltaforge_dagster.state.store import StateStore

RECONCILED = "reconciled"


class ReconcileConfig(dg.Config):
    """What a run of the check does."""

    repair: bool = Field(
        default=False,
        description="Make rows of the sink that differ what they should be, deletes included. "
        "Otherwise it is only said which rows differ.",
    )
    max_seconds: float | None = Field(
        default=None, ge=0, description="Begin nothing more after so many seconds."
    )
    rate: float | None = Field(
        default=None, gt=0, description="Read at most so many rows of the source a second."
    )


def reconciled_key(pipeline: str, table: KnownTable) -> dg.AssetCheckKey:
    """Return the key of a table's check."""
    return dg.AssetCheckKey(lake_table_key(pipeline, table.sink, table.source), RECONCILED)


def reconcile_op_name(pipeline: str) -> str:
    """Return the name of the op behind the checks of a pipeline's tables."""
    return f"{dagster_name(pipeline)}_reconcile_tables"


def reconcile_job_name(pipeline: str) -> str:
    """Return the name of the job that compares all tables of a pipeline's sinks."""
    return f"{dagster_name(pipeline)}_reconcile"


def build_reconcile_job(
    loaded: LoadedPipeline, tables: Sequence[KnownTable]
) -> UnresolvedAssetJobDefinition:
    """Return the job that compares all tables of a pipeline's sinks."""
    return dg.define_asset_job(
        reconcile_job_name(loaded.name),
        selection=dg.AssetSelection.checks(
            *(reconciled_key(loaded.name, table) for table in tables)
        ),
        executor_def=dg.in_process_executor,
        tags={PIPELINE_TAG: loaded.name},
        description=f"Compares the tables of {loaded.name}'s sinks with the source; repairs "
        "them if its configuration says `repair: true`.",
    )


def build_reconcile_checks(
    loaded: LoadedPipeline, tables: Sequence[KnownTable], platform: Platform
) -> dg.AssetChecksDefinition:
    """Return the checks of all tables of a pipeline's sinks.

    Dagster derives the names of the op's outputs from asset keys, which fails with many a table's
    name. So the checks are built with keys that are plain names, and get the real ones afterwards.
    """
    by_key = {reconciled_key(loaded.name, table): table for table in tables}
    plain = {key.asset_key: _plain(key.asset_key) for key in by_key}

    @dg.multi_asset_check(
        name=reconcile_op_name(loaded.name),
        specs=[_spec(plain[key.asset_key]) for key in by_key],
        can_subset=True,
        op_tags={PIPELINE_TAG: loaded.name},
    )
    def reconcile(
        context: dg.AssetCheckExecutionContext, config: ReconcileConfig
    ) -> Iterator[dg.AssetCheckResult]:
        chosen = [by_key[key] for key in context.selected_asset_check_keys]
        try:
            with platform.open() as opened:
                yield from _results(context, config, loaded, opened, chosen)
        except DeltaforgeError as error:
            raise dg.Failure(str(error), allow_retries=False) from None

    real = {of_names: key for key, of_names in plain.items()}
    checks: dg.AssetChecksDefinition = dg.AssetChecksDefinition.create(
        keys_by_input_name={
            name: real[of_names] for name, of_names in reconcile.keys_by_input_name.items()
        },
        node_def=reconcile.op,
        check_specs_by_output_name={
            output: _spec(real[spec.asset_key])
            for output, spec in reconcile.check_specs_by_output_name.items()
        },
        can_subset=True,
    )
    return checks


def _spec(asset: dg.AssetKey) -> dg.AssetCheckSpec:
    return dg.AssetCheckSpec(
        RECONCILED, asset=asset, description="Whether the table has what the source has."
    )


def _plain(key: dg.AssetKey) -> dg.AssetKey:
    """Return a key that is a valid Python name, and different for different keys."""
    return dg.AssetKey(dagster_name("/".join(key.path)))


def _results(
    context: dg.AssetCheckExecutionContext,
    config: ReconcileConfig,
    loaded: LoadedPipeline,
    opened: Opened,
    tables: Sequence[KnownTable],
) -> Iterator[dg.AssetCheckResult]:
    """Compare tables, those first whose last comparison began first; yield each result."""
    from deltaforge_dagster.pipeline.reconcile.compare import (  # noqa: PLC0415
        CompareOptions,
        TableComparison,
    )
    from deltaforge_dagster.resources.run_context import build_run_context  # noqa: PLC0415

    store, sessions = opened.store, build_run_context(opened, loaded).replay_sessions

    def begun(table: KnownTable) -> float:
        return store.reconciliations.last(loaded.name, table.sink, table.name).begun

    deadline = None if config.max_seconds is None else time.monotonic() + config.max_seconds
    with closing(build_source(loaded.spec)) as source:
        for number, table in enumerate(sorted(tables, key=begun)):
            if deadline is not None and time.monotonic() >= deadline:
                context.log.info("%d tables are left for another time", len(tables) - number)
                return
            options = CompareOptions(table.sink, table.name, 1.0, deadline, config.rate)
            comparison = TableComparison(loaded, store, opened.journal, source, sessions, options)
            remark = ""
            try:
                (report,) = comparison.execute()
            except NotAllowed as error:  # the table is not captured any more
                context.log.warning("%s in %s: %s", table.name, table.sink, error)
                continue
            if report.differs and config.repair:
                repaired, report = comparison.repair(report)
                remark = f"repaired: {repaired.problem or repaired.verdict}; "
            result = _result(loaded, store, table, report, remark)
            context.op_execution_context.log_event(_observation(result))
            yield result


def _result(
    loaded: LoadedPipeline,
    store: "StateStore",
    table: KnownTable,
    report: "TableReport",
    remark: str,
) -> dg.AssetCheckResult:
    """Return the result of a table's check."""
    key = reconciled_key(loaded.name, table)
    proofs = store.reconciliations.proofs(loaded.name)
    proof = next((p for p in proofs if (p.sink, p.table) == (table.sink, table.name)), None)
    proven: dict[str, str | float] = {}
    if proof is not None:
        age = store.now() - proof.verified_at
        proven = {
            "verified_through": proof.verified_through,
            "proof_age_seconds": round(max(0.0, age), 3),
        }
    return dg.AssetCheckResult(
        passed=not report.differs and report.problem is None,
        asset_key=key.asset_key,
        check_name=key.name,
        severity=dg.AssetCheckSeverity.ERROR if report.differs else dg.AssetCheckSeverity.WARN,
        description=f"{remark}{_verdict(report)}",
        metadata={
            "rows": report.rows,
            "missing": report.missing,
            "extra": report.extra,
            "different": report.different,
            "duplicate": report.duplicate,
            "coverage": round(report.coverage, 6),
            **proven,
            "report": dg.MetadataValue.json(report.to_json(values=False)),
        },
    )


def _observation(result: dg.AssetCheckResult) -> dg.AssetObservation:
    """Return an observation of the table with the numbers of its check, which Dagster plots.

    It has no data version, so that nothing that waits for new data reacts to it.
    """
    assert result.asset_key is not None
    return dg.AssetObservation(
        result.asset_key,
        description=f"compared: {result.description}",
        metadata={
            f"reconcile_{name}": value
            for name, value in result.metadata.items()
            if isinstance(value, dg.IntMetadataValue | dg.FloatMetadataValue)
        },
    )


def _verdict(report: "TableReport") -> str:
    """Return what a comparison has found, in one line."""
    if report.problem is not None:
        found = f"{report.verdict}; " if report.differs else ""
        return f"{found}not compared: {report.problem}"
    partly = "" if report.whole else f", as far as it was compared ({report.coverage:.0%})"
    return f"{report.verdict}{partly}"
