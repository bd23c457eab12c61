"""A pipeline file that cannot be loaded: shown as an asset with a failing check.

One bad file never stops the other pipelines; the definitions load without it, and the UI shows
what is wrong with it.
"""

import dagster as dg

from deltaforge_dagster.config.load import BrokenPipeline

FILE_CHECK = "file"


def broken_key(broken: BrokenPipeline) -> dg.AssetKey:
    """Return the asset key that stands for a broken file."""
    return dg.AssetKey([broken.name, "pipeline_file"])


def build_broken_asset(broken: BrokenPipeline) -> dg.AssetSpec:
    """Return the asset that stands for a broken file."""
    return dg.AssetSpec(
        broken_key(broken),
        group_name="broken_pipeline_files",
        description=f"This pipeline file cannot be loaded:\n\n```\n{broken.error}\n```",
    )


def build_broken_check(broken: BrokenPipeline) -> dg.AssetChecksDefinition:
    """Return the check of a broken file; it fails with every problem of the file."""

    @dg.asset_check(
        name=FILE_CHECK, asset=broken_key(broken), description="The pipeline file can be loaded."
    )
    def file() -> dg.AssetCheckResult:
        return dg.AssetCheckResult(passed=False, description=str(broken.error))

    return file


def broken_evaluation(broken: BrokenPipeline) -> dg.AssetCheckEvaluation:
    """Return the check's outcome, for reporting it without a run."""
    return dg.AssetCheckEvaluation(
        asset_key=broken_key(broken),
        check_name=FILE_CHECK,
        passed=False,
        description=str(broken.error),
    )
