"""A job whose runs are launched by tests: it says where it is executed, then waits for a file."""

import os
import sys
import time
from pathlib import Path

import dagster as dg

FOLDER_TAG = "folder"
"""Tag of a run: where the op writes `began` and waits for `go`."""


@dg.op
def wait(context: dg.OpExecutionContext) -> None:
    """Write the number of the process and whether it had Spark's client from the beginning, and wait."""
    folder = Path(context.run.tags[FOLDER_TAG])
    told = folder / "began.part"
    told.write_text(f"{os.getpid()} {'pyspark' in sys.modules}")
    told.rename(folder / "began")
    while not (folder / "go").exists():
        time.sleep(0.05)


@dg.job(executor_def=dg.in_process_executor)
def waiting() -> None:
    """Wait."""
    wait()
