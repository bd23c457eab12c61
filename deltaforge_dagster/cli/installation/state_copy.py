"""`deltaforge state`: back up the state store to one file, and restore it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltaforge_dagster.cli.arguments import JsonOption, opened_store
from deltaforge_dagster.cli.output import say
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.pipeline.plural import pluralize, size
from deltaforge_dagster.state import copies
from deltaforge_dagster.state.store import StateStore

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def state() -> None:
    """Back up the state store to one file, and restore it."""


@app.command()
def backup(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File to write; must not exist yet.")
    ],
    *,
    json_output: JsonOption = False,
) -> None:
    """Copy the whole state store in one consistent state; runs may continue meanwhile.

    The copy contains row data (dead letters), so only the owner may read it. It does not contain
    the journal's files.
    """
    with opened_store() as store:
        rows = copies.back_up(store, file)
        names = [row.name for row in store.pipelines.read()]
    written = file.stat().st_size
    say(
        (
            f"{file}: {pluralize(rows, 'row')} of {pluralize(len(names), 'pipeline')}, "
            f"{size(written)}."
        ),
        {"file": str(file), "bytes": written, "rows": rows, "pipelines": names},
        as_json=json_output,
    )


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file written by `backup`.")],
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the current content of the store.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Restore the state store from a backup, which may come from another kind of store.

    No run may be live. Capture resumes at the positions of the backup, and at-least-once sinks
    receive again what they received since then. A pipeline whose source no longer has that position
    stops with an error.
    """
    url = Settings.from_env().state_url
    if url == "memory":
        raise NotAllowed("DELTAFORGE_STATE_URL is memory: the restored state would be lost")
    store = StateStore.open(url)
    try:
        rows = copies.restore(file, store, force=force)
        pipelines = store.pipelines.read()
        where = store.database.where
    finally:
        store.close()
    names = [row.name for row in pipelines]
    say(
        f"{where} was restored from {file}: {pluralize(sum(rows.values()), 'row')} of "
        f"{pluralize(len(names), 'pipeline')}.",
        {"store": where, "rows": sum(rows.values()), "pipelines": names},
        as_json=json_output,
    )
