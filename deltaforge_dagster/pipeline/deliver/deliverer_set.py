"""The deliverers of one run, one for each attached sink: started, watched and stopped together."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from deltaforge_dagster.config.model import PipelineSpec
from deltaforge_dagster.config.sinks import SinkBlock
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.committed import segments_behind
from deltaforge_dagster.pipeline.deliver.deliverer import Deliverer
from deltaforge_dagster.pipeline.deliver.messages import MessageDelivery
from deltaforge_dagster.pipeline.delivery import (
    Delivery,
    DeliveryContext,
    DeliveryThread,
)
from deltaforge_dagster.pipeline.encode.cache import EncodeCache
from deltaforge_dagster.pipeline.encode.encoder import Encoder
from deltaforge_dagster.pipeline.encode.versions import RegisteredVersions
from deltaforge_dagster.pipeline.meters import SinkMeter
from deltaforge_dagster.pipeline.pending_segments import PendingSegments
from deltaforge_dagster.pipeline.process.processing import Processing
from deltaforge_dagster.pipeline.run_context import LeasedRun, RunContext
from deltaforge_dagster.pipeline.sensing.sensing import END_SECONDS, Sensing
from deltaforge_dagster.sinks.registry import TableSinkType, sink_types
from deltaforge_dagster.state.records import CheckpointRow, PipelineRow

_GRACE_SECONDS = 10.0
"""Seconds that a sink has to finish its current batch when the run ends."""


class DelivererSet:
    """The deliverers of one run and what they share.

    Args:
        spec: The pipeline.
        context: Makes Spark sessions and sinks.
        run: The run.
        only: Deliver to this sink alone.
        until: Deliver nothing after this segment, and skip the wait after earlier failures: a user
            has requested this delivery.
        at_once: Do not let changes of tables wait for more, and skip the wait after earlier
            failures: the run only catches up, because a user has requested that.

    Attributes:
        sessions: The run's Spark session.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        context: RunContext,
        run: LeasedRun,
        *,
        only: str | None = None,
        until: int | None = None,
        at_once: bool = False,
    ) -> None:
        self._pipeline = spec.metadata.name
        self._sinks = {sink.config.id for sink in spec.spec.sinks if only in {None, sink.config.id}}
        self._context = context
        self._run = run
        self._store = run.store
        self._until = until
        self._at_once = at_once
        row = self._store.leases.get(self._pipeline)
        session_id = None if row is None else row.session_id
        self.sessions = context.sessions(session_id, self._remember_session)
        self._spec = spec
        self._segments = PendingSegments(
            run.store, self._pipeline, chained=bool(spec.spec.processors)
        )
        versions = RegisteredVersions(run.store.schemas, self._pipeline)
        self._encoder = Encoder(
            spec, run.journal, self.sessions, run.lease.run_id, run.warn, versions
        )
        self._encode_cache = EncodeCache(
            self._encoder,
            self._segments,
            self._pipeline,
            spec.spec.engine.deliver.max_bytes,
            len(self._sinks),
            last=until,
        )
        self._processing: Processing | None = None
        self._sensing: Sensing | None = None
        self._working: dict[str, Deliverer] = {}
        self._retired: list[Deliverer] = []

    def poll(self) -> None:
        """Start a deliverer for each attached sink without one; stop those of paused sinks.

        The previous deliverer of a sink must have ended, because two would mix their order.
        """
        if self._processing is None and self._spec.spec.processors:
            self._processing = Processing(
                self._spec,
                self._store,
                self._run.journal,
                self.sessions,
                self._run.lease,
                processed=self._wake,
            )
        options = self._spec.spec.schema_sensing
        senses = options is not None and options.enabled
        if self._sensing is None and self._until is None and senses:
            self._sensing = Sensing(
                self._spec,
                self._store,
                self._run.journal,
                self.sessions,
                self._run.lease,
                segments=self._segments,
                warn=self._run.warn,
            )
        checkpoints = self._store.checkpoints.read(self._pipeline)
        for sink_id, checkpoint in checkpoints.items():
            if checkpoint.paused and sink_id in self._working:
                self._retire(sink_id)
        busy = {
            deliverer.sink_id for deliverer in self._retired if deliverer.alive
        } | self._working.keys()
        for sink_id, checkpoint in checkpoints.items():
            if sink_id not in self._sinks - busy or checkpoint.state != "attached":
                continue
            if self._until is not None:
                checkpoint = replace(checkpoint, failures=0)  # noqa: PLW2901
            if self._until is not None or self._at_once:
                checkpoint = replace(checkpoint, next_attempt_at=0.0)  # noqa: PLW2901
            self._working[sink_id] = self._deliverer(sink_id, checkpoint)

    def _deliverer(self, sink_id: str, checkpoint: CheckpointRow) -> Deliverer:
        meter = SinkMeter(sink_id)
        context = DeliveryContext(self._run, self._spec, sink_id, self._segments, meter)
        return Deliverer(
            context, checkpoint, lambda thread: self._delivery(context, checkpoint, thread)
        )

    def _delivery(
        self, context: DeliveryContext, checkpoint: CheckpointRow, thread: DeliveryThread
    ) -> Delivery:
        sink_id = context.sink_id
        if isinstance(sink_types()[self._block(sink_id).type], TableSinkType):
            # Imported here, because most pipelines have no such sink.
            from deltaforge_dagster.pipeline.deliver.table_delivery import (  # noqa: PLC0415
                build_table_delivery,
            )

            return build_table_delivery(
                self._context,
                context,
                checkpoint,
                thread,
                self.sessions,
                at_once=self._at_once,
                until=self._until,
            )
        return MessageDelivery(
            context,
            checkpoint,
            thread,
            build_sink=lambda: self._context.build_sink(sink_id),
            encoder=self._encoder,
            encode_cache=self._encode_cache,
            until=self._until,
        )

    def wind_up(self) -> bool:
        """Keep deliveries from beginning long work; return whether none is doing such work."""
        under_way = [
            deliverer for deliverer in self._working.values() if not deliverer.delivery.wind_up()
        ]
        return not under_way

    def _block(self, sink_id: str) -> SinkBlock:
        return next(block for block in self._spec.spec.sinks if block.config.id == sink_id)

    def detach(self, sink_id: str, why: str) -> None:
        """Detach a sink at once, even in the middle of a send.

        Raises:
            LeaseLost: The lease is lost; the sink is still attached.
        """
        self._run.lease.write(lambda writer: writer.checkpoints.detach(sink_id, why))
        if sink_id in self._working:  # a paused sink has no deliverer
            self._retire(sink_id).join(0)

    def _retire(self, sink_id: str) -> Deliverer:
        """Ask a deliverer to stop after its current batch."""
        deliverer = self._working.pop(sink_id)
        self._retired.append(deliverer)
        deliverer.request_stop()
        return deliverer

    def segment_added(self) -> None:
        """Wake the deliverers or the processing: the journal has a new segment."""
        if self._processing is None:
            self._wake()
        else:
            self._processing.segment_added()

    def _wake(self) -> None:
        for deliverer in list(self._working.values()):
            deliverer.segment_added()
        self._encode_cache.segment_added()
        if self._sensing is not None:
            self._sensing.segment_added()

    def end(self) -> None:
        """Let the sinks finish their current batches, and stop all threads.

        This does not wait for Spark's jobs.
        """
        if self._processing is not None:
            self._processing.end()
        if self._sensing is not None:
            self._sensing.end()
        for deliverer in self._working.values():
            deliverer.request_stop()
        for deliverer in (*self._retired, *self._working.values()):
            deliverer.join(_GRACE_SECONDS)
        if self._sensing is not None:
            self._sensing.join(END_SECONDS)
        self._encode_cache.close()
        self.sessions.close()
        for thread in (self._processing, self._sensing):
            if thread is not None:
                thread.join(_GRACE_SECONDS)

    @property
    def someone_waits(self) -> bool:
        """Whether a sink has everything and delivers the next segment as soon as it is captured."""
        working = list(self._working.values())
        return any(deliverer.waiting and deliverer.delivery.prompt for deliverer in working)

    @property
    def segment_wanted(self) -> bool:
        """Whether the next segment would be delivered or encoded as soon as it is captured."""
        return self.someone_waits or self._encode_cache.wants_more

    @property
    def awaits_capture(self) -> bool:
        """Whether changes that a sink has must be captured again before it can continue."""
        return any(deliverer.awaits_capture for deliverer in list(self._working.values()))

    @property
    def redriving(self) -> set[str]:
        """The sinks that have, or may have, work besides segments (`Delivery.redriving`)."""
        return {name for name, deliverer in self._working.items() if deliverer.delivery.redriving}

    @property
    def moved_at(self) -> float:
        """Monotonic time of the last acknowledgement of any sink, 0 without sinks."""
        return max(
            (deliverer.delivery.progress.moved_at for deliverer in self._working.values()),
            default=0.0,
        )

    @property
    def failures(self) -> dict[str, DeltaforgeError]:
        """The last error of each sink that fails, or that waits for failing processors."""
        broken = None if self._processing is None else self._processing.error
        errors = {
            name: deliverer.retries.error or (broken if deliverer.waiting else None)
            for name, deliverer in self._working.items()
        }
        return {name: error for name, error in errors.items() if error is not None}

    def stuck(self, pipeline: PipelineRow) -> set[str]:
        """Return the failing sinks that a run need not wait for: no attempt comes soon."""
        captured = pipeline.captured_position or pipeline.start_position
        broken = self._processing is not None and self._processing.stuck
        return {name for name in self.failures if broken or self._working[name].stuck(captured)}

    @property
    def errors(self) -> dict[str, str]:
        """`failures` as text."""
        return {name: str(error) for name, error in self.failures.items()}

    @property
    def done(self) -> bool:
        """Whether every sink has all segments up to `until`."""
        reached = (
            deliverer.delivery.progress.checkpoint.whole_segment
            for deliverer in self._working.values()
        )
        return self._until is not None and all(self._until <= segment for segment in reached)

    @property
    def sent(self) -> dict[str, int]:
        """Number of messages sent, by sink."""
        total: Counter[str] = Counter()
        for deliverer in (*self._retired, *self._working.values()):
            total[deliverer.sink_id] += deliverer.delivery.progress.rows
        return dict(total)

    @property
    def latencies(self) -> dict[str, dict[str, float]]:
        """Recent delivery latencies of each sink (`meters`)."""
        return {name: deliverer.latencies for name, deliverer in list(self._working.items())}

    @property
    def timeouts(self) -> dict[str, int]:
        """How often each sink missed its deadline; without the sinks that never did."""
        total: Counter[str] = Counter()
        for deliverer in (*self._retired, *self._working.values()):
            total[deliverer.sink_id] += deliverer.delivery.timeouts
        return dict(+total)

    def behind(self, pipeline: PipelineRow) -> dict[str, int]:
        """Return the number of missing segments for each sink that is behind."""
        lacking = {
            name: segments_behind(pipeline, deliverer.delivery.progress.checkpoint)
            for name, deliverer in self._working.items()
        }
        return {name: count for name, count in lacking.items() if count}

    def _remember_session(self, session_id: str) -> None:
        self._run.lease.write(lambda writer: writer.lease.set_session(session_id))
