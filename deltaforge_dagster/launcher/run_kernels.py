"""The machine code that runs need, loaded before they are forked (`run_launcher`)."""

from __future__ import annotations

import contextlib
import gc

from deltaforge_dagster.pipeline.encode import messages

with contextlib.suppress(Exception):  # a run that cannot load it says why
    messages.warm()
# As after the imports of runs (`run_process`).
gc.collect()
gc.freeze()
