"""The `deltaforge` command: its list of commands, and what errors look like.

Exit codes: 0 done, 1 failed, 2 used wrongly (an unknown name, a wrong file or setting), 130 ended by
Ctrl-C. An error of ours, and one of the file system, is one message on standard error, never a stack.

Commands live in modules of their own, imported when called: `deltaforge --help` needs neither
Dagster nor PySpark.
"""

from __future__ import annotations

import importlib
import os
from enum import StrEnum
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from deltaforge_dagster import __version__
from deltaforge_dagster.errors import DeltaforgeError, NotAllowed, SettingsError, SpecError

COMMANDS = {
    "demo": ("demo:demo", "Start everything, write live changes, and prove that each arrived."),
    "validate": ("validate:validate", "Check pipeline files; print every problem and warning."),
    "schema": ("schema:schema", "Print the pipeline file's format as JSON Schema, for editors."),
    "plan": ("plan:plan", "Show what a pipeline file means, makes and changes."),
    "check": ("check:check", "Look at a pipeline's source and sinks; name what they lack."),
    "dev": ("dev:dev", "Run every pipeline here, with Dagster's UI, until Ctrl-C."),
    "serve": ("serve:serve", "Serve the REST API and the metrics, until Ctrl-C."),
    "run": ("run:run", "Capture and deliver with one run, without a daemon."),
    "replay": ("run:replay", "Deliver closed ranges to one sink again, marked as a replay."),
    "preview": ("preview:preview", "Show what changed processors would make of a range."),
    "start": ("desired_state:start", "Let a stopped pipeline go on."),
    "pause": (
        "desired_state:pause",
        "Capture nothing more of a pipeline; deliver what is captured.",
    ),
    "resume": ("desired_state:start", "Let a paused pipeline go on."),
    "stop": ("desired_state:stop", "Capture and deliver nothing more of a pipeline."),
    "status": ("status:status", "Show pipelines: how far they are, lag, sinks, what fails."),
    "ranges": ("ranges:ranges", "Show a pipeline's newest ranges and who has them."),
    "checkpoint": ("checkpoint:app", "Show how far sinks have acknowledged, set it, or import it."),
    "find": ("find:find", "Show where the changes of a key are, and which sinks have them."),
    "state": ("state_copy:app", "Copy the state store to one file, and bring it back."),
    "journal": ("journal:app", "Bring a journal back whose files were lost."),
    "verify": ("verify:verify", "Prove that the journal is whole, and what the source's log says."),
    "snapshot": ("snapshot:app", "Read tables as they are, beside the stream; show how far it is."),
    "schemas": ("schemas:app", "Show which forms tables had, and what the database has now."),
    "sensing": ("sensing:app", "Show the fields of documents, and rows unlike their tables."),
    "hold": ("hold:app", "Show what is kept back of a pipeline; release or approve it."),
    "dlq": ("dlq:app", "Show changes that could not be delivered; deliver them again."),
    "sink": ("sink:app", "Pause one sink and let it go on; attach one that was detached."),
    "bench": ("bench.app:app", "Measure how fast parts of the platform are on this machine."),
    "warm": ("warm:warm", "Compile and cache the kernels, as when building an image."),
}
"""Module below `deltaforge_dagster.cli` and its function or app, and the line in the list."""


class LogFormat(StrEnum):
    """How lines of the log look."""

    JSON = "json"
    TEXT = "text"


_USED_WRONGLY = (NotAllowed, SettingsError, SpecError)


class _Group(TyperGroup):
    """Turns our errors into messages and exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was called."""
        try:
            return super().invoke(ctx)
        except DeltaforgeError as error:
            typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
            raise typer.Exit(2 if isinstance(error, _USED_WRONGLY) else 1) from error
        except OSError as error:
            if error.filename is None:  # a connection: somebody should have made it one of ours
                raise
            message = f"error: {error.filename}: {error.strerror}{_hint(str(error.filename))}"
            typer.secho(message, fg=typer.colors.RED, err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _hint(path: str) -> str:
    """Return what to do about a path that cannot be used, where it is the installation's home."""
    from deltaforge_dagster.config.settings import Settings  # noqa: PLC0415 - only for errors

    try:
        home = Settings.from_env().home
    except SettingsError:
        return ""
    if not f"{path}/".startswith(f"{home}/"):
        return ""
    return "; DELTAFORGE_HOME must be a directory that this user may write to"


def _load(target: str) -> Any:
    """Return the ready command for an entry of `COMMANDS`."""
    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(f"deltaforge_dagster.cli.{module}"), name)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False)
        alone.command()(found)
        found = alone
    return typer.main.get_command(found)


def _deferred(target: str) -> type[TyperCommand]:
    class Deferred(TyperCommand):
        """Stands in the list of commands, and hands over when it is called."""

        def make_context(
            self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
        ) -> Any:
            return _load(target).make_context(info_name, args, parent, **extra)

    return Deferred


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"deltaforge {__version__}")
        raise typer.Exit


app = typer.Typer(cls=_Group, pretty_exceptions_enable=False)


@app.callback(no_args_is_help=True)
def deltaforge(
    *,
    version: Annotated[  # noqa: ARG001 - its callback acts
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
    log_format: Annotated[
        LogFormat | None,
        typer.Option("--log-format", help="Of what is logged to standard error."),
    ] = None,
) -> None:
    """Change data capture with Dagster and Spark: one YAML file is one pipeline."""
    if log_format is not None:
        os.environ["DELTAFORGE_LOG_FORMAT"] = (
            log_format.value
        )  # for the processes that it starts, too


for _name, (_target, _help) in COMMANDS.items():
    app.command(_name, cls=_deferred(_target), help=_help)(lambda: None)
