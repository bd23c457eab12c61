"""`deltaforge state`: the state store copied to one file, and brought back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deltaforge_dagster.cli.options import JsonOption
from deltaforge_dagster.cli.output import say, size
from deltaforge_dagster.cli.state import opened_store
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.errors import NotAllowed
from deltaforge_dagster.pipeline.plural import pluralize
from deltaforge_dagster.state import copies
from deltaforge_dagster.state.store import StateStore

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def state() -> None:
    """Copy the state store to one file, and bring it back."""


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to; must not exist yet.")],
    *,
    json_output: JsonOption = False,
) -> None:
    """Copy the whole state store, as it is at one moment, while runs go on.

    The copy holds rows (dead letters), so only you may read it. The journal's files are not in it.
    """
    with opened_store() as store:
        rows = copies.back_up(store, file)
        names = [row.name for row in store.pipelines()]
    written = file.stat().st_size
    say(
        f"{file}: {pluralize(rows, 'row')} of {pluralize(len(names), 'pipeline')}, {size(written)}.",
        {"file": str(file), "bytes": written, "rows": rows, "pipelines": names},
        as_json=json_output,
    )


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A copy that `backup` made.")],
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Replace everything that the store holds now.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Make the state store what a copy says; the kinds of both stores may differ.

    No run may be at work. Capture goes on where the copy stands; sinks at least once receive again what
    they have received since. A pipeline whose source has forgotten that position stops and says so.
    """
    url = Settings.from_env().state_url
    if url == "memory":
        raise NotAllowed("DELTAFORGE_STATE_URL is memory: nothing restored would be there later")
    store = StateStore.open(url)
    try:
        rows = copies.restore(file, store, force=force)
        pipelines = store.pipelines()
        where = store.database.where
    finally:
        store.close()
    names = [row.name for row in pipelines]
    say(
        f"{where} is as it was in {file}: {pluralize(sum(rows.values()), 'row')} of "
        f"{pluralize(len(names), 'pipeline')}.",
        {"store": where, "rows": sum(rows.values()), "pipelines": names},
        as_json=json_output,
    )
