"""The machine code that runs need, loaded before they are forked (`run_launcher`)."""

from __future__ import annotations

import contextlib
import gc

from deltaforge_dagster.pipeline.run.kernels import is_ready, make_ready

if is_ready("messages"):  # else a run compiles it, and says so
    with contextlib.suppress(Exception):  # a run that cannot load it says why
        make_ready("messages")
# As after the imports of runs (`run_process`).
gc.collect()
gc.freeze()
