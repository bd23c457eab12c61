"""Runs of one world in processes of their own, which may die at a failpoint."""

from __future__ import annotations

import json
import signal

from deltaforge_dagster.pipeline.failpoints import VARIABLE
from tests.kills import child
from tests.pipeline.test_exactly_once import World
from tests.state.make import expire


def run(world: World, step: str | None = None) -> int | None:
    """Let a run deliver everything, in a process that dies at a failpoint; return its exit code.

    It begins again where a busy machine ended it too early. A lease that no busy machine loses
    outlives a run that died by long: that time is not waited for.
    """
    for _ in range(5):
        code = _once(world, step)
        if code == -signal.SIGKILL:
            expire(world.feed.store)
        said = json.loads(world.feed.path.with_name("run.json").read_text()) if code == 0 else {}
        if code != 0 or (step is None and said.get("reason") == "caught up"):
            break
    return code


def _once(world: World, step: str | None) -> int | None:
    environment = {
        "DELTAFORGE_HOME": str(world.home),
        **world.spark.settings(world.home),
        "DELTAFORGE_SINK_FAULTS": str(world.folder / "faults"),
    }
    if step is not None:
        environment[VARIABLE] = step
    process = child.start(world.feed.path, environment, "run", until_caught_up=True)
    process.join(300)
    code = process.exitcode
    process.kill()
    process.join()
    process.close()
    return code
