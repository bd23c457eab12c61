"""Collected metrics for tests: values by family and labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.metrics_core import Metric

from deltaforge_dagster.api.metrics import collect
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.state.metric_families import PREFIX
from deltaforge_dagster.state.store import StateStore


class Scraped:
    """The metrics of one scrape."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.metrics = list(metrics)

    def of(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with this name and these labels, 0 if there is none."""
        return sum(
            sample.value
            for metric in self.metrics
            for sample in metric.samples
            if sample.name == PREFIX + name and labels.items() <= sample.labels.items()
        )


def scrape(store: StateStore, *pipelines: LoadedPipeline) -> Scraped:
    """Collect the metrics of pipelines."""
    found: Sequence[LoadedPipeline] = pipelines
    return Scraped(collect(store, found))
