"""`deltaforge warm`: machine code before the first run needs it."""

from __future__ import annotations

import time

import typer

from deltaforge_dagster.pipeline import messages
from deltaforge_dagster.processors import spliced_fields
from deltaforge_dagster.sensing import scan
from deltaforge_dagster.sinks import nats_answers, nats_pack, resp, resp_replies
from deltaforge_dagster.sources import hiding, snapshot_rows
from deltaforge_dagster.sources.mysql import made_up as mysql
from deltaforge_dagster.sources.mysql import selected as mysql_selected
from deltaforge_dagster.sources.postgres import copied as postgres_copied
from deltaforge_dagster.sources.postgres import made_up as postgres
from deltaforge_dagster.sources.postgres import selected as postgres_selected


def warm() -> None:
    """Compile every kernel and keep the machine code, so that no run waits for it.

    It is kept in NUMBA_CACHE_DIR, else in the user's cache directory (~/.cache/deltaforge/kernels), where
    the same user's later processes find it. Takes some minutes the first time.
    """
    started = time.monotonic()
    postgres.warm()
    mysql.warm()
    postgres_copied.warm()
    postgres_selected.warm()
    mysql_selected.warm()
    snapshot_rows.warm()
    hiding.warm()
    messages.warm()
    spliced_fields.warm()
    scan.warm()
    resp.warm()
    resp_replies.warm()
    nats_pack.warm()
    nats_answers.warm()
    typer.echo(f"Kernels are ready ({time.monotonic() - started:.1f} s).")
