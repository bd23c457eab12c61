"""The route that validates a pipeline without creating it."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from deltaforge_dagster.api.context import Context
from deltaforge_dagster.api.documents import DOCUMENT_BODY, JsonObject, checked
from deltaforge_dagster.api.errors import BuildFailed
from deltaforge_dagster.api.shapes import Invalid, Valid
from deltaforge_dagster.config.secrets import mask
from deltaforge_dagster.errors import SpecError

router = APIRouter(tags=["Pipelines"])


@router.post(
    "/validate",
    response_model=Valid,
    responses={int(HTTPStatus.BAD_REQUEST): {"model": Invalid}},
    openapi_extra=DOCUMENT_BODY,
)
def validate(document: JsonObject, context: Context) -> Valid | JSONResponse:
    """Validate a pipeline without connecting to anything; return all problems at once."""
    try:
        loaded = checked(document, strict=context.settings.strict)
    except (SpecError, BuildFailed) as error:
        answer = Invalid(error=mask(str(error))).model_dump()
        return JSONResponse(answer, status_code=HTTPStatus.BAD_REQUEST)
    spec = loaded.spec.spec
    return Valid(
        pipeline=loaded.name,
        source_type=spec.source.type,
        sink_count=len(spec.sinks),
        warnings=list(loaded.warnings),
    )
