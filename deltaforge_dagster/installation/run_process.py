"""What the fork server of runs imports, and the machine code that it loads, before it forks a run.

See `run_launcher`.
"""

from __future__ import annotations

import contextlib
import gc

from deltaforge_dagster.installation.arrow_memory import arrow_uses_malloc

arrow_uses_malloc()

# ruff: noqa: E402
from deltaforge_dagster.dagster_private import RUN_MODULES
from deltaforge_dagster.installation.forked import share
from deltaforge_dagster.pipeline.pandas_later import arrow_without_pandas

_MODULES = (
    *RUN_MODULES,
    "deltaforge_dagster.definitions",
    "deltaforge_dagster.assets.execution",
    "deltaforge_dagster.pipeline.run.leased_work",
    "deltaforge_dagster.resources.spark",
)
"""Modules that a run would otherwise import when it first needs them."""


arrow_without_pandas()
share(_MODULES)

from deltaforge_dagster.pipeline.run.kernels import is_ready, make_ready

if is_ready("messages"):  # else a run compiles it, and says so
    with contextlib.suppress(Exception):  # a run that cannot load it says why
        make_ready("messages")
# For the same reason as after the imports in `forked.share`.
gc.collect()
gc.freeze()
