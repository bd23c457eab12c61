"""Logs changes of the response to `/readyz` and of each pipeline's status.

A separate thread checks every few seconds, so the log lines do not depend on requests to the API.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from deltaforge_dagster.api.context import ApiContext
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.control.catalog import AnyPipeline
from deltaforge_dagster.pipeline.health.health import Health, health

logger = logging.getLogger(__name__)

_EVERY_SECONDS = 5.0


class Readiness:
    """The last state seen, so that only changes are logged. For use by one thread.

    Args:
        context: The installation to check.
    """

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._unready: str | None = ""  # neither ready (None) nor a reason: the first check logs
        self._logged: dict[str, Health] = {}

    def check(self) -> None:
        """Log what has changed since the last call; on the first call, log everything."""
        try:
            states = [
                (pipeline, health(self._context.store, pipeline))
                for pipeline in self._context.pipelines()
            ]
        except DeltaforgeError as error:
            self._log_readiness(mask(str(error)))
            return
        except Exception:  # the thread must survive; the next check may succeed
            logger.exception("checking the pipelines failed")
            return
        self._log_readiness(None)
        for pipeline, state in states:
            self._log_pipeline(pipeline, state)
        for name in self._logged.keys() - {pipeline.name for pipeline, _ in states}:
            del self._logged[name]
            logger.info("the pipeline is gone", extra={"fields": {"pipeline": name}})

    def _log_readiness(self, unready: str | None) -> None:
        if unready == self._unready:
            return
        self._unready = unready
        if unready is None:
            logger.info("ready")
        else:
            logger.warning("not ready", extra={"fields": {"reason": unready}})

    def _log_pipeline(self, pipeline: AnyPipeline, state: Health) -> None:
        before = self._logged.get(pipeline.name)
        if before is not None and (state.status, state.error) == (before.status, before.error):
            return
        self._logged[pipeline.name] = state
        fields = {
            "pipeline": pipeline.name,
            "tenant": pipeline.spec.metadata.tenant
            if isinstance(pipeline, LoadedPipeline)
            else None,
            "status": state.status,
            "before": None if before is None else before.status,
            "reason": state.error,
        }
        level = logging.INFO if state.well else logging.WARNING
        logger.log(level, "the pipeline is %s", state.status, extra={"fields": fields})


@contextmanager
def watched(context: ApiContext, every: float = _EVERY_SECONDS) -> Iterator[None]:
    """Check an installation every `every` seconds for as long as the block lasts."""
    readiness, ended = Readiness(context), threading.Event()

    def check() -> None:
        readiness.check()
        while not ended.wait(every):
            readiness.check()

    thread = threading.Thread(target=check, name="readiness")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
