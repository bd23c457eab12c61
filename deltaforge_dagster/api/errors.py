"""Errors of requests, and the response to every error.

A response has a status, a code and one message without secrets.

The body of the response is `{"error": message, "code": CODE, "message": message}`.
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

from deltaforge_dagster.config.file.load import BrokenPipeline
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.errors import DeltaforgeError, NotAllowed, Retryable, SpecError, Terminal

T = TypeVar("T")

logger = logging.getLogger(__name__)


class RequestRefused(Terminal):
    """A request is refused; subclasses define the status and the code of the response."""

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
    """A pipeline of that name already exists."""

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
    """A run still works on the pipeline, or another request has just changed it."""

    code = "PIPELINE_BUSY"


class BadRequest(RequestRefused):
    """The request's body or parameters are invalid."""

    status = HTTPStatus.BAD_REQUEST
    code = "INVALID_REQUEST"


class NameMismatch(RequestRefused):
    """A patch names another pipeline."""

    status = HTTPStatus.BAD_REQUEST
    code = "PIPELINE_NAME_MISMATCH"


class BuildFailed(RequestRefused):
    """The spec is well formed, but its sinks or processors cannot be built."""

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    code = "BUILD_FAILED"


class ClientGone(RequestRefused):
    """The client has closed the connection; the status, nginx's, only appears in metrics."""

    status = 499
    code = "CLIENT_GONE"


class FeatureOff(RequestRefused):
    """The pipeline does not use the requested feature."""

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    code = "NOT_ENABLED"


def found(ask: Callable[[], T]) -> T:
    """Return what `ask` returns, and turn its `NotAllowed` into a response with status 404.

    Raises:
        NotFound: What was asked for, such as a table or version, does not exist.
    """
    try:
        return ask()
    except NotAllowed as error:
        raise NotFound(str(error)) from error


def body(code: str, message: str) -> dict[str, str]:
    """Return the body of an error response."""
    return {"error": message, "code": code, "message": message}


def add_handlers(app: FastAPI) -> None:
    """Make an app return every error in the same form."""
    app.add_exception_handler(DeltaforgeError, _deltaforge_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _of_framework)
    app.add_exception_handler(Exception, _defect)


def _answer(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse(body(code, mask(message)), status_code=status)


def _deltaforge_error(_request: Request, error: Exception) -> JSONResponse:
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
    # Without the values, which may be secrets.
    problems = [
        f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
    ]
    return _answer(HTTPStatus.BAD_REQUEST, BadRequest.code, "; ".join(problems))


def _of_framework(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    answer = _answer(status, status.name, str(error.detail))
    answer.headers.update(error.headers or {})
    return answer


def _defect(_request: Request, error: Exception) -> JSONResponse:
    logger.error("a request failed: %s", type(error).__name__, exc_info=error)
    return _answer(
        HTTPStatus.INTERNAL_SERVER_ERROR, "INTERNAL_ERROR", "internal error; see the server's log"
    )
