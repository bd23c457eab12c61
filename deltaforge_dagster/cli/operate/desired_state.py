"""`deltaforge start`, `resume`, `pause` and `stop`: set the desired state of a pipeline.

A live run reads the desired state whenever it renews its lease, every few seconds; the sensor reads
it before it starts a run.
"""

from __future__ import annotations

from deltaforge_dagster.cli.arguments import (
    JsonOption,
    NameArgument,
    PipelineArgument,
    known_pipeline,
    opened_store,
    select_pipeline,
)
from deltaforge_dagster.cli.output import say
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.pipeline.control.desired_state import resume_pipeline


def start(pipeline: PipelineArgument, *, json_output: JsonOption = False) -> None:
    """Resume a paused or stopped pipeline where capture and delivery stopped.

    With `snapshot.mode: always` in its file, the pipeline begins with a snapshot.
    """
    _, loaded = select_pipeline(Settings.from_env(), pipeline)
    with opened_store() as store:
        known_pipeline(store, loaded.name)
        done = resume_pipeline(store, loaded)
    snapshot = ", with a snapshot" if done.snapshot else ""
    running = done.before == "running"
    say(
        f"{loaded.name} {'is already running' if running else f'resumes{snapshot}'}.",
        {"pipeline": loaded.name, "want": "running", "snapshot": done.snapshot},
        as_json=json_output,
    )


def pause(pipeline: NameArgument, *, json_output: JsonOption = False) -> None:
    """Stop capturing changes; those already in the journal are still delivered."""
    with opened_store() as store:
        known_pipeline(store, pipeline)
        store.pipelines.set_desired_state(pipeline, "paused")
    say(
        f"{pipeline} is paused: no more changes are captured, and the source keeps its log. "
        f"To resume: deltaforge resume {pipeline}",
        {"pipeline": pipeline, "want": "paused"},
        as_json=json_output,
    )


def stop(pipeline: NameArgument, *, json_output: JsonOption = False) -> None:
    """Stop capturing and delivering; a live run ends within seconds."""
    with opened_store() as store:
        known_pipeline(store, pipeline)
        store.pipelines.set_desired_state(pipeline, "stopped")
    say(
        (
            f"{pipeline} is stopped, and the source keeps its log. "
            f"To start it: deltaforge start {pipeline}"
        ),
        {"pipeline": pipeline, "want": "stopped"},
        as_json=json_output,
    )
