"""Routes for the health of the server and of all pipelines, which is also logged.

A separate thread checks every few seconds and logs changes of the response to `/readyz` and of each
pipeline's status, so the log lines do not depend on requests to the API (`watched`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse

from deltaforge_dagster import __version__
from deltaforge_dagster.api.context import ApiContext, Context
from deltaforge_dagster.api.guard import ALIVE_PATH
from deltaforge_dagster.api.shapes import (
    Healthy,
    LogLevel,
    Ready,
    Unhealthy,
    Version,
    info,
    troubles,
)
from deltaforge_dagster.config import logs
from deltaforge_dagster.config.file.load import LoadedPipeline
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.errors import DeltaforgeError
from deltaforge_dagster.pipeline.control.catalog import AnyPipeline
from deltaforge_dagster.pipeline.health.health import Health, health

logger = logging.getLogger(__name__)


router = APIRouter(tags=["Health"])


@router.get(ALIVE_PATH, response_class=PlainTextResponse)
def alive() -> str:
    """Return `ok` while the process is alive; needs no token."""
    return "ok"


@router.get("/readyz")
@router.get("/ready", operation_id="ready_by_its_other_name")
def ready(context: Context) -> Ready:
    """Return every pipeline with its status; 503 if store or pipelines cannot be read."""
    return Ready(pipelines=[info(context.store, pipeline) for pipeline in context.pipelines()])


@router.get(
    "/health",
    response_model=Healthy,
    response_model_exclude_none=True,
    responses={int(HTTPStatus.SERVICE_UNAVAILABLE): {"model": Unhealthy}},
)
def healthy(context: Context) -> Healthy | JSONResponse:
    """Return whether every pipeline captures and delivers; 503 with the problems if one does not.

    Pipelines with warnings, and paused or stopped pipelines, are healthy.
    """
    pipelines = context.pipelines()
    states = {pipeline.name: health(context.store, pipeline) for pipeline in pipelines}
    problems = {name: troubles(state) for name, state in states.items() if state.problems}
    failed = [name for name, state in states.items() if not state.well]
    if failed:
        answer = Unhealthy(failed_pipelines=failed, problems=problems).model_dump()
        return JSONResponse(answer, status_code=HTTPStatus.SERVICE_UNAVAILABLE)
    return Healthy(pipelines=len(pipelines), problems=problems or None)


@router.get("/log-level")
def log_level() -> LogLevel:
    """Return the filter of the server's logs."""
    return LogLevel(level=logs.level())


@router.get("/version")
def version() -> Version:
    """Return the version of this release."""
    return Version(version=__version__)


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
