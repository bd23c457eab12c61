"""One run in a process of its own, which reports what it did and the most memory that it had.

Not by `ru_maxrss`: that begins with what the process had that started us, whose mark survives
`exec`, and a test session may be large itself. The kernel's mark of our own memory does not.

`python -m tests.pipeline.lone_run FILE ROW_GROUP_BYTES` runs the pipeline of a file until it is
caught up and prints one JSON object. Small row groups let a small transaction be a large one.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import uuid
from pathlib import Path

from deltaforge_dagster.config.file.load import load_pipeline
from deltaforge_dagster.config.settings import Settings
from deltaforge_dagster.journal import writer as writing
from deltaforge_dagster.pipeline.run.live import LiveRun
from deltaforge_dagster.pipeline.run_context import RunOptions
from deltaforge_dagster.resources.platform import Platform
from deltaforge_dagster.resources.run_context import build_run_context
from tests.pipeline.live import Watcher


def main(path: Path, row_group_bytes: int) -> None:
    """Run until caught up, and report."""
    writing.ROW_GROUP_BYTES = row_group_bytes
    loaded, run_id = load_pipeline(path), str(uuid.uuid4())
    with Platform(Settings.from_env()).open() as opened:
        run = LiveRun(
            loaded,
            build_run_context(opened, loaded),
            RunOptions(run_id, Watcher(opened.store, loaded.name), until_caught_up=True),
        )
        outcome = run.execute()
    found = {**dataclasses.asdict(outcome), "run_id": run_id, "max_rss": _most_memory()}
    print(json.dumps(found))  # noqa: T201


def _most_memory() -> int:
    """Return the most resident memory that this process has had, bytes (proc_pid_status(5))."""
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(kib) << 10


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
