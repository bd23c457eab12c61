"""Which events of a table are looked at: the first ones all, then one in so many."""

from __future__ import annotations

import numpy as np

from deltaforge_dagster.config.sensing import Sampling
from deltaforge_dagster.sources.kernel import Longs


def chosen(sampling: Sampling, seen: int, events: int) -> Longs:
    """Return which of the next events of a table are looked at, counted from 0.

    Args:
        sampling: The rules.
        seen: How many events came before.
        events: How many there are.
    """
    warm = min(max(sampling.warmup_events - seen, 0), events)
    rate = max(sampling.sample_rate, 1)
    behind = seen + warm - sampling.warmup_events
    later = np.arange(warm + -behind % rate, events, rate, dtype=np.int64)
    return np.concatenate([np.arange(warm, dtype=np.int64), later])
