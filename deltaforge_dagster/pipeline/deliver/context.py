"""What the parts of one sink's deliverer share."""

from __future__ import annotations

from dataclasses import dataclass

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.pipeline.meters import SinkMeter
from deltaforge_dagster.pipeline.pending_segments import PendingSegments
from deltaforge_dagster.pipeline.run_context import LeasedRun


@dataclass(frozen=True, slots=True)
class DeliveryContext:
    """One sink of a run.

    Attributes:
        run: The run: store, journal and lease.
        spec: The pipeline file.
        sink_id: The sink.
        segments: The segments that are ready to be delivered.
        meter: Counts what is sent to the sink.
    """

    run: LeasedRun
    spec: PipelineSpec
    sink_id: str
    segments: PendingSegments
    meter: SinkMeter
