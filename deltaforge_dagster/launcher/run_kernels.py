"""Load the machine code that runs need, before they are forked (`run_launcher`)."""

from __future__ import annotations

import contextlib
import gc

from deltaforge_dagster.pipeline.run.kernels import is_ready, make_ready

if is_ready("messages"):  # else a run compiles it, and says so
    with contextlib.suppress(Exception):  # a run that cannot load it says why
        make_ready("messages")
# For the same reason as after the imports in `processes.forked.share`.
gc.collect()
gc.freeze()
