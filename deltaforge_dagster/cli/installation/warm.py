"""`deltaforge warm`: compile the kernels, and archive Spark's classes, before the first run needs them."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated, Any

import typer

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.kernels import compiler
from deltaforge_dagster.pipeline.encode import messages
from deltaforge_dagster.pipeline.tables import keys as table_keys
from deltaforge_dagster.processors.sql import spliced_fields
from deltaforge_dagster.resources import spark_recording
from deltaforge_dagster.sensing import scan
from deltaforge_dagster.sinks.registry import sink_types
from deltaforge_dagster.sources.registry import source_types
from deltaforge_dagster.sources.rows import hiding
from deltaforge_dagster.sources.snapshot import rows as snapshot_rows
from deltaforge_dagster.typed_rows import rows as typed_rows

_COMPILED = "*.nbi"
"""Numba's index files, one per compiled kernel. Its cache folders already exist once a kernel is imported."""

_SOURCES = tuple(source_types().values())
_PARTS: tuple[tuple[Any, ...], ...] = (
    (*_SOURCES[::2], snapshot_rows, hiding, messages, scan),
    (*_SOURCES[1::2], spliced_fields, typed_rows, table_keys, *sink_types().values()),
)
"""Modules with kernels, and kinds of sources and sinks, in two parts that take about equally long to compile."""


def warm(
    *,
    spark: Annotated[
        bool,
        typer.Option(help="Also archive the classes of Spark; DELTAFORGE_SPARK_REMOTE needs none."),
    ] = True,
) -> None:
    """Compile every kernel, and archive the classes of Spark, so that no run has to wait for it.

    Machine code is cached in NUMBA_CACHE_DIR, or else in the user's cache directory (~/.cache/deltaforge/kernels), where
    later processes of the same user find it. The first compilation takes a minute or two. With the archive
    (~/.cache/deltaforge/spark, 200 MB) Spark starts in half the time.
    """
    started = time.monotonic()
    if not any(compiler.cache_folder().rglob(_COMPILED)) and (os.cpu_count() or 1) > 1:
        _compile_side_by_side()
    for part in range(len(_PARTS)):
        _compile(part)
    typer.echo(f"Kernels are ready ({time.monotonic() - started:.1f} s).")
    if spark and Settings.from_env().spark_remote is None:
        _archive_classes()


def _archive_classes() -> None:
    started = time.monotonic()
    try:
        spark_recording.record()
    except (DeltaforgeError, OSError) as error:
        typer.echo(
            f"Spark starts more slowly, without an archive of its classes: {error}", err=True
        )
    else:
        typer.echo(f"Spark's classes are ready ({time.monotonic() - started:.1f} s).")


def _compile_side_by_side() -> None:
    """Compile each part in a separate process; this process then finds the machine code in the cache."""
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(_PARTS), mp_context=spawning) as processes:
        list(processes.map(_compile, range(len(_PARTS))))


def _compile(part: int) -> None:
    for one in _PARTS[part]:
        one.warm()
