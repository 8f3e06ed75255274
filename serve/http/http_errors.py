"""Errors in OpenAI's form: {"error": {message, type, param, code}}. No input is ever echoed."""

import logging
import math

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from draftkeep.errors import (
    BusyError,
    DeniedError,
    DraftkeepError,
    ForbiddenError,
    InputError,
    NotFoundError,
    UnavailableError,
)

_log = logging.getLogger(__name__)

_STATUS: tuple[tuple[type[DraftkeepError], int, str, str | None], ...] = (
    (InputError, 400, "invalid_request_error", None),
    (DeniedError, 401, "authentication_error", "invalid_api_key"),
    (ForbiddenError, 403, "permission_error", None),
    (NotFoundError, 404, "not_found_error", "model_not_found"),
    (BusyError, 429, "rate_limit_error", None),
    (UnavailableError, 503, "service_unavailable_error", None),
)


def error_body(error: DraftkeepError) -> tuple[int, dict[str, object]]:
    """(status, body) of an error."""
    status, kind, code = 500, "server_error", None
    for known, its_status, its_kind, its_code in _STATUS:
        if isinstance(error, known):
            status, kind, code = its_status, its_kind, its_code
            break
    param = error.param if isinstance(error, InputError) else None
    if isinstance(error, NotFoundError):
        param = "model"
    return status, _body(str(error), kind, param, code)


def install(app: FastAPI) -> None:
    """Make every error of the app an error of this form."""

    @app.exception_handler(DraftkeepError)
    async def _ours(request: Request, error: DraftkeepError) -> JSONResponse:
        status, body = error_body(error)
        headers = None
        if isinstance(error, BusyError | UnavailableError):
            headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        return JSONResponse(body, status_code=status, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        message, param = _first(error)
        return JSONResponse(_body(message, "invalid_request_error", param), status_code=400)

    @app.exception_handler(HTTPException)
    async def _routing(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(
            _body(str(error.detail), "invalid_request_error", None), status_code=error.status_code
        )

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JSONResponse:
        # The type and the route's pattern alone: the error's text and the path may hold anything.
        route = getattr(request.scope.get("route"), "path", "no route")
        _log.error("unexpected %s on %s", type(error).__name__, route)
        return JSONResponse(_body("internal error", "server_error", None), status_code=500)


def _first(error: RequestValidationError) -> tuple[str, str | None]:
    """The first problem, by field and rule. Pydantic's own text names rules, not input."""
    item = error.errors()[0]
    # Only the first name: what follows may be a key of the caller's own, as in logit_bias.
    place = [part for part in item["loc"][1:] if isinstance(part, str)]
    if item["type"] == "json_invalid":
        return "the body is not valid JSON", None
    if item["type"] == "extra_forbidden":
        return "the body holds a field that this route does not know", None
    if not place:
        return "the body must be a JSON object, sent as application/json", None
    rule = str(item["msg"]) if item["type"] != "value_error" else "is not allowed"
    return f"{place[0]}: {rule}", place[0]


def _body(message: str, kind: str, param: str | None, code: str | None = None) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
