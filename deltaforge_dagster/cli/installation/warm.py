"""`deltaforge warm`: compile kernels and archive Spark's classes before the first run."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated

import typer

from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.installation import spark_recording
from deltaforge_dagster.pipeline.run.kernels import all_kernels, is_ready, make_ready

_PARTS = 2


def warm(
    *,
    spark: Annotated[
        bool,
        typer.Option(help="Also archive the classes of Spark; DELTAFORGE_SPARK_REMOTE needs none."),
    ] = True,
) -> None:
    """Compile every kernel, and archive the classes of Spark, so that no run has to wait for it.

    Machine code is cached in NUMBA_CACHE_DIR, or else in the user's cache directory
    (~/.cache/deltaforge/kernels), where later processes of the same user find it. The first
    compilation takes a minute or two. With the archive (~/.cache/deltaforge/spark, 200 MB) Spark
    starts in half the time.
    """
    started = time.monotonic()
    if not any(map(is_ready, all_kernels())) and (os.cpu_count() or 1) > 1:
        _compile_side_by_side()
    for name in all_kernels():
        make_ready(name)
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
    """Compile in two processes; this one then finds the machine code in the cache."""
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_PARTS, mp_context=spawning) as processes:
        list(processes.map(make_ready, all_kernels()))
