"""`deltaforge start`, `resume`, `pause` and `stop`: what a pipeline shall do, also while a run works on it.

A live run looks at this whenever it renews its lease, some seconds at most, and the sensor before it
starts another.
"""

from __future__ import annotations

from deltaforge_dagster.cli.options import JsonOption, NameArgument, PipelineArgument
from deltaforge_dagster.cli.output import say
from deltaforge_dagster.cli.selection import select_pipeline
from deltaforge_dagster.cli.state import known_pipeline, opened_store
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.pipeline.desired_state import resume_pipeline


def start(pipeline: PipelineArgument, *, json_output: JsonOption = False) -> None:
    """Let a paused or stopped pipeline go on after what was captured and delivered.

    With `snapshot.mode: always` in its file it begins with a snapshot.
    """
    _, loaded = select_pipeline(Settings.from_env(), pipeline)
    with opened_store() as store:
        known_pipeline(store, loaded.name)
        done = resume_pipeline(store, loaded)
    snapshot = ", with a snapshot" if done.snapshot else ""
    running = done.before == "running"
    say(
        f"{loaded.name} {'is running already' if running else f'goes on{snapshot}'}.",
        {"pipeline": loaded.name, "want": "running", "snapshot": done.snapshot},
        as_json=json_output,
    )


def pause(pipeline: NameArgument, *, json_output: JsonOption = False) -> None:
    """Capture nothing more; what is in the journal is still delivered."""
    with opened_store() as store:
        known_pipeline(store, pipeline)
        store.set_desired_state(pipeline, "paused")
    say(
        f"{pipeline} is paused: nothing more is captured, and the source keeps its log; "
        f"deltaforge resume {pipeline}",
        {"pipeline": pipeline, "want": "paused"},
        as_json=json_output,
    )


def stop(pipeline: NameArgument, *, json_output: JsonOption = False) -> None:
    """Capture and deliver nothing more; a run that is at work ends within seconds."""
    with opened_store() as store:
        known_pipeline(store, pipeline)
        store.set_desired_state(pipeline, "stopped")
    say(
        f"{pipeline} is stopped, and the source keeps its log; deltaforge start {pipeline}",
        {"pipeline": pipeline, "want": "stopped"},
        as_json=json_output,
    )
