"""The jars with which Spark writes Delta and Iceberg tables.

They are not in a Python package: `deltaforge lake install` puts them into the folder that the
settings name. Once they are there, the installation's own Spark server starts with them
(`spark_server.py`). Without them the server stays smaller.
"""

from __future__ import annotations

from pathlib import Path

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.installation.maven import Artifact
from deltaforge_dagster.installation.spark_server import SparkServer
from deltaforge_dagster.sources.findings import Finding

RESTART = (
    "it gets them when no run uses it, or once `deltaforge dev`, which uses it all the time, is "
    "restarted"
)
"""How a running Spark server gets jars that were installed since it was started."""

LAKE_JARS = (
    Artifact(
        "io.delta:delta-spark_4.1_2.13:4.3.1",
        "ebf35a4383f0a653c3ee3c7882c0edcac2f846be31ac61af4b96ccfaaf36c171",
    ),
    Artifact(
        "io.delta:delta-storage:4.3.1",
        "577c12c7e371be4c041714fb48e88ad86e3c3512beea2bdaffbe7a4debf79718",
    ),
    Artifact(
        "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",
        "3123c3798af642dd537230923548e013ef41cc28b6626e5225808cf5670a0f82",
    ),
)
"""Delta and Iceberg for the Spark of `pyproject.toml`; each jar has all that it needs."""


def installed_jars(folder: Path) -> list[Path]:
    """Return the jars in `folder`, or nothing unless all of them are there.

    Their content is not checked: `lake install` writes no wrong file.
    """
    jars = [folder / jar.file_name for jar in LAKE_JARS]
    return jars if all(jar.is_file() for jar in jars) else []


def jars_finding(settings: Settings) -> Finding:
    """Return what `deltaforge check` says about the jars of the Spark server that writes tables."""
    if settings.spark_remote is not None:
        text = (
            "only a run shows whether the server of DELTAFORGE_SPARK_REMOTE has the jars for tables"
        )
        return Finding("spark", "note", text)
    jars = installed_jars(settings.lake_jars)
    if not jars:
        text = f"{settings.lake_jars} lacks jars with which Spark writes tables"
        return Finding("spark", "error", text, "deltaforge lake install")
    if SparkServer.runs_without(settings.home, jars):
        text = (
            f"the running Spark server lacks the jars for tables in {settings.lake_jars}: {RESTART}"
        )
        return Finding("spark", "error", text)
    return Finding("spark", "ok", f"jars for tables in {settings.lake_jars}")


def missing_jars(folder: Path) -> list[Artifact]:
    """Return the jars that `folder` lacks, or has with another content."""
    return [jar for jar in LAKE_JARS if not jar.is_at(folder / jar.file_name)]
