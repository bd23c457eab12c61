"""Choose the events of a table to inspect: all during the warm-up, then a sample."""

from __future__ import annotations

import numpy as np

from deltaforge_dagster.config.sensing import Sampling
from deltaforge_dagster.kernels.runtime import Longs


def chosen(sampling: Sampling, seen: int, events: int) -> Longs:
    """Return the indexes of the next events of a table that are inspected, counted from 0.

    Args:
        sampling: The sampling options.
        seen: The number of earlier events.
        events: The number of next events.
    """
    warm = min(max(sampling.warmup_events - seen, 0), events)
    rate = max(sampling.sample_rate, 1)
    behind = seen + warm - sampling.warmup_events
    later = np.arange(warm + -behind % rate, events, rate, dtype=np.int64)
    return np.concatenate([np.arange(warm, dtype=np.int64), later])
