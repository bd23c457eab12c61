"""Errors of requests, and how every error is answered: status, code and one message, no secret in it.

An answer's body is `{"error": message, "code": CODE, "message": message}`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from deltaforge_dagster.config.load import BrokenPipeline
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.errors import DeltaforgeError, NotAllowed, Retryable, SpecError, Terminal

T = TypeVar("T")

logger = logging.getLogger(__name__)


class RequestRefused(Terminal):
    """A request cannot be done; subclasses say with which status and code that is answered."""

    status: int = HTTPStatus.CONFLICT
    code = "CONFLICT"


class PipelineNotFound(RequestRefused):
    """There is no pipeline of that name."""

    status = HTTPStatus.NOT_FOUND
    code = "PIPELINE_NOT_FOUND"

    def __init__(self, name: str) -> None:
        super().__init__(f"no pipeline {name!r}")


class NotFound(RequestRefused):
    """A pipeline has no such table, entry or sink."""

    status = HTTPStatus.NOT_FOUND
    code = "NOT_FOUND"


class PipelineExists(RequestRefused):
    """Another pipeline has that name."""

    code = "PIPELINE_ALREADY_EXISTS"


class PipelineBroken(RequestRefused):
    """The pipeline's file or document has problems."""

    code = "PIPELINE_BROKEN"

    def __init__(self, broken: BrokenPipeline) -> None:
        super().__init__(f"pipeline {broken.name!r} cannot be loaded: {broken.error}")


class PipelineHasFile(RequestRefused):
    """Only the pipeline's file can change it."""

    code = "PIPELINE_HAS_FILE"


class PipelineBusy(RequestRefused):
    """A run still works on the pipeline."""

    code = "PIPELINE_BUSY"


class BadRequest(RequestRefused):
    """The body is not what it has to be."""

    status = HTTPStatus.BAD_REQUEST
    code = "INVALID_REQUEST"


class NameMismatch(RequestRefused):
    """A patch names another pipeline."""

    status = HTTPStatus.BAD_REQUEST
    code = "PIPELINE_NAME_MISMATCH"


class BuildFailed(RequestRefused):
    """The spec is well formed, and its sinks or processors cannot be built."""

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    code = "BUILD_FAILED"


class ClientGone(RequestRefused):
    """Nobody waits for the answer any more; the status is for metrics, in nginx's sense."""

    status = 499
    code = "CLIENT_GONE"


class FeatureOff(RequestRefused):
    """The pipeline does not use what is asked about."""

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    code = "NOT_ENABLED"


def found(ask: Callable[[], T]) -> T:
    """Return what `ask` returns; what it knows nothing of is answered with 404.

    Raises:
        NotFound: There is no such table, version or whatever was asked for.
    """
    try:
        return ask()
    except NotAllowed as error:
        raise NotFound(str(error)) from error


def body(code: str, message: str) -> dict[str, str]:
    """Return the body of an error's answer."""
    return {"error": message, "code": code, "message": message}


def add_handlers(app: FastAPI) -> None:
    """Let an app answer every error in one form."""
    app.add_exception_handler(DeltaforgeError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _of_framework)
    app.add_exception_handler(Exception, _defect)


def _answer(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse(body(code, mask(message)), status_code=status)


def _ours(_request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, RequestRefused):
        return _answer(error.status, error.code, str(error))
    if isinstance(error, SpecError):
        return _answer(HTTPStatus.BAD_REQUEST, BadRequest.code, str(error))
    if isinstance(error, NotAllowed):
        return _answer(HTTPStatus.CONFLICT, RequestRefused.code, str(error))
    if isinstance(error, Retryable):
        return _answer(HTTPStatus.SERVICE_UNAVAILABLE, "UNAVAILABLE", str(error))
    return _answer(HTTPStatus.INTERNAL_SERVER_ERROR, "INTERNAL_ERROR", str(error))


def _invalid(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    # Without the values: one may be a secret.
    problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    return _answer(HTTPStatus.BAD_REQUEST, BadRequest.code, "; ".join(problems))


def _of_framework(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    answer = _answer(status, status.name, str(error.detail))
    answer.headers.update(error.headers or {})
    return answer


def _defect(_request: Request, error: Exception) -> JSONResponse:
    logger.error("a request broke: %s", type(error).__name__, exc_info=error)
    return _answer(
        HTTPStatus.INTERNAL_SERVER_ERROR, "INTERNAL_ERROR", "the request broke; the log says where"
    )
