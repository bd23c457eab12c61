"""The `deltaforge` command: the list of its commands, exit codes and error messages.

Exit codes: 0 success, 1 failure, 2 wrong usage (an unknown name, an invalid file or setting), 130
interrupted by Ctrl-C. A `DeltaforgeError` or a file system error is one message on standard error,
never a stack trace.

Each command's module is imported only when the command is called, so `deltaforge --help` loads
neither Dagster nor PySpark.
"""

from __future__ import annotations

import gc
import importlib
import os
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from deltaforge_dagster import __version__
from deltaforge_dagster.errors import DeltaforgeError, NotAllowed, SettingsError, SpecError
from deltaforge_dagster.installation.arrow_memory import arrow_uses_malloc

_COMMANDS = {
    "validate": (
        "files.validate:validate",
        "Check pipeline files; print every problem and warning.",
    ),
    "schema": (
        "files.validate:schema",
        "Print the pipeline file's format as JSON Schema, for editors.",
    ),
    "plan": ("files.plan:plan", "Show what a pipeline file means, creates and changes."),
    "check": ("files.check:check", "Check a pipeline's source and sinks; report what is missing."),
    "dev": ("installation.dev:dev", "Run every pipeline, with Dagster's UI, until Ctrl-C."),
    "serve": ("installation.serve:serve", "Serve the REST API and the metrics, until Ctrl-C."),
    "run": ("installation.run:run", "Capture and deliver with one run, without a daemon."),
    "replay": (
        "installation.run:replay",
        "Deliver closed ranges to one sink again, marked as a replay.",
    ),
    "preview": ("files.preview:preview", "Show what changed processors would make of a range."),
    "start": ("operate.desired_state:start", "Start a stopped pipeline again."),
    "pause": (
        "operate.desired_state:pause",
        "Stop capturing a pipeline's changes; deliver those already captured.",
    ),
    "resume": ("operate.desired_state:start", "Resume a paused pipeline."),
    "stop": ("operate.desired_state:stop", "Stop capturing and delivering a pipeline's changes."),
    "remove": (
        "operate.remove:remove",
        "Remove a pipeline whose file was deleted: its slot, publication, state and journal.",
    ),
    "status": ("operate.status:status", "Show pipelines: progress, lag, sinks and problems."),
    "ranges": (
        "inspect.ranges:ranges",
        "Show a pipeline's newest ranges and which sinks have them.",
    ),
    "checkpoint": (
        "operate.checkpoint:app",
        "Show the checkpoints of sinks, set them, or import them.",
    ),
    "find": (
        "inspect.find:find",
        "Show where the changes of a key are, and which sinks have them.",
    ),
    "state": (
        "installation.state_copy:app",
        "Back up the state store to one file, and restore it.",
    ),
    "journal": ("operate.recover:journal_app", "Rebuild a journal whose files were lost."),
    "verify": (
        "inspect.verify:verify",
        "Verify the journal's files, and compare them with the source's log.",
    ),
    "reconcile": (
        "inspect.reconcile:reconcile",
        "Compare tables of sinks with the source, while both go on.",
    ),
    "snapshot": (
        "operate.snapshot:app",
        "Read whole tables while the stream goes on; show the progress.",
    ),
    "schemas": (
        "inspect.schemas:app",
        "Show the versions of tables, and compare them with the database.",
    ),
    "sensing": (
        "inspect.sensing:app",
        "Show fields of JSON documents, and rows that differ from tables.",
    ),
    "hold": ("operate.hold:app", "Show a pipeline's held changes; release or approve them."),
    "dlq": ("operate.dlq:app", "Show dead letters; deliver them again or discard them."),
    "sink": ("operate.sink:app", "Pause and resume one sink; attach a detached one."),
    "recover": (
        "operate.recover:recover",
        "Go on after the source's log has lost the pipeline's position.",
    ),
    "acknowledge": (
        "operate.recover:acknowledge",
        "Let sinks go without what the source's log lacks of tables.",
    ),
    "resync": ("operate.snapshot:resync", "Load tables of a sink that keeps tables again."),
    "lake": (
        "installation.lake:app",
        "Prepare this machine to write Delta and Iceberg tables; read and maintain them.",
    ),
    "warm": (
        "installation.warm:warm",
        "Compile and cache the kernels; archive the classes of Spark, which starts faster then.",
    ),
}
"""For each command, its module in `deltaforge_dagster.cli` with function or app, and its `--help`
line."""


def _commands() -> dict[str, tuple[str, str]]:
    """Return the commands of this package and of installed packages, in the form of `_COMMANDS`.

    An entry point of the group `deltaforge.commands` names a dictionary of the same form, with full
    module names. It is imported for each command, `--help` included, so it belongs in a module that
    imports nothing. If a package is broken, only its own commands are missing.
    """
    commands = {
        name: (f"{__package__}.{target}", text) for name, (target, text) in _COMMANDS.items()
    }
    for added in entry_points(group="deltaforge.commands"):
        try:
            commands.update(added.load())
        except Exception as error:  # noqa: BLE001 - another package's code may raise anything
            package = added.dist.name if added.dist else added.value
            message = f"warning: the commands of package {package} are missing: {error!r}"
            typer.secho(message, fg=typer.colors.YELLOW, err=True)
    return commands


COMMANDS = _commands()


class LogFormat(StrEnum):
    """The format of log lines."""

    JSON = "json"
    TEXT = "text"


_USED_WRONGLY = (NotAllowed, SettingsError, SpecError)


class _Group(TyperGroup):
    """Turns exceptions of commands into messages and exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was called."""
        try:
            return super().invoke(ctx)
        except DeltaforgeError as error:
            typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
            raise typer.Exit(2 if isinstance(error, _USED_WRONGLY) else 1) from error
        except OSError as error:
            if (
                error.filename is None
            ):  # from a connection; it should have been turned into a DeltaforgeError
                raise
            message = f"error: {error.filename}: {error.strerror}{_hint(str(error.filename))}"
            typer.secho(message, fg=typer.colors.RED, err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def _hint(path: str) -> str:
    """Return a hint about an unusable path, if it is in the installation's home directory."""
    from deltaforge_dagster.config.settings import Settings  # noqa: PLC0415 - only for errors

    try:
        home = Settings.from_env().home
    except SettingsError:
        return ""
    if not f"{path}/".startswith(f"{home}/"):
        return ""
    return "; DELTAFORGE_HOME must be a directory that this user may write to"


def _load(target: str) -> Any:
    """Import and return the command for the target of an entry in `COMMANDS`.

    Imported objects never become garbage, but Python's collector visits their growing number again
    and again, which takes a fifth of a run's start. So it is disabled during the import, and the
    objects are frozen afterwards.
    """
    module, _, name = target.partition(":")
    gc.disable()
    try:
        command = getattr(importlib.import_module(module), name)
    finally:
        gc.freeze()
        gc.enable()
    if not isinstance(command, typer.Typer):
        alone = typer.Typer(add_completion=False)
        alone.command()(command)
        command = alone
    return typer.main.get_command(command)


def _deferred(target: str) -> type[TyperCommand]:
    class Deferred(TyperCommand):
        """A placeholder in the list of commands that loads the real command when it is called."""

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
    version: Annotated[  # noqa: ARG001 - handled by its callback
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    log_format: Annotated[
        LogFormat | None,
        typer.Option("--log-format", help="Format of the log on standard error."),
    ] = None,
    project: Annotated[
        Path | None,
        typer.Option(
            help="A Dagster project: the pipelines, and where their state is, are those of its "
            "components."
        ),
    ] = None,
) -> None:
    """Change data capture with Dagster and Spark: one YAML file is one pipeline."""
    arrow_uses_malloc()
    if log_format is not None:
        os.environ["DELTAFORGE_LOG_FORMAT"] = log_format.value  # so that child processes inherit it
    if project is not None:
        _use_project(project.absolute())


def _use_project(folder: Path) -> None:
    """Set the variables of a project's installation, for this process and its children."""
    from deltaforge_dagster.config.file.project import project_installation  # noqa: PLC0415
    from deltaforge_dagster.config.settings import project_environment  # noqa: PLC0415

    variables = project_environment(project_installation(folder), folder)
    os.environ.update({"DELTAFORGE_PIPELINES": str(folder), **variables})


for _name, (_target, _help) in COMMANDS.items():
    app.command(_name, cls=_deferred(_target), help=_help)(lambda: None)
