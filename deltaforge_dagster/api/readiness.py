"""Log lines about who is ready: when the API's answer to `/readyz` turns, and when a pipeline's status does.

Looked for every few seconds by a thread of its own, so the lines come whoever asks the API for what.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from deltaforge_dagster.api.context import ApiContext
from deltaforge_dagster.config.load import LoadedPipeline
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.catalog import AnyPipeline
from deltaforge_dagster.pipeline.health import Health, health

logger = logging.getLogger(__name__)

_EVERY_SECONDS = 5.0


class Readiness:
    """What was seen last, so that only what has turned since is a line. For one thread.

    Args:
        context: The installation that is looked at.
    """

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._unready: str | None = ""
        self._seen: dict[str, Health] = {}

    def look(self) -> None:
        """Log what is otherwise than at the last look; at the first, what is ready and what is not."""
        try:
            now = [(one, health(self._context.store, one)) for one in self._context.pipelines()]
        except DeltaforgeError as error:
            self._turned(mask(str(error)))
            return
        except Exception:  # the next look may go well, and nobody would look any more
            logger.exception("a look at the pipelines broke")
            return
        self._turned(None)
        for pipeline, found in now:
            self._pipeline(pipeline, found)
        for name in self._seen.keys() - {one.name for one, _ in now}:
            del self._seen[name]
            logger.info("the pipeline is gone", extra={"fields": {"pipeline": name}})

    def _turned(self, unready: str | None) -> None:
        if unready == self._unready:
            return
        self._unready = unready
        if unready is None:
            logger.info("ready")
        else:
            logger.warning("not ready", extra={"fields": {"reason": unready}})

    def _pipeline(self, pipeline: AnyPipeline, now: Health) -> None:
        before = self._seen.get(pipeline.name)
        if before is not None and (now.status, now.error) == (before.status, before.error):
            return
        self._seen[pipeline.name] = now
        fields = {
            "pipeline": pipeline.name,
            "tenant": pipeline.spec.metadata.tenant
            if isinstance(pipeline, LoadedPipeline)
            else None,
            "status": now.status,
            "before": None if before is None else before.status,
            "reason": now.error,
        }
        level = logging.INFO if now.well else logging.WARNING
        logger.log(level, "the pipeline is %s", now.status, extra={"fields": fields})


@contextmanager
def watched(context: ApiContext, every: float = _EVERY_SECONDS) -> Iterator[None]:
    """Look at an installation for as long as the block lasts."""
    readiness, ended = Readiness(context), threading.Event()

    def look() -> None:
        readiness.look()
        while not ended.wait(every):
            readiness.look()

    thread = threading.Thread(target=look, name="readiness")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
