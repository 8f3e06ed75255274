"""Errors in OpenAI's form: {"error": {message, type, param, code}}. No input is ever echoed."""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from draftkeep.errors import BusyError, DeniedError, DraftkeepError, InputError

RETRY_AFTER_S = 1
_log = logging.getLogger(__name__)


class NotFoundError(DraftkeepError):
    """The model asked for is not the one served (HTTP 404)."""


class ForbiddenError(DraftkeepError):
    """An administrative route without the administrator's key (HTTP 403)."""


class UnavailableError(DraftkeepError):
    """The engine is not running (HTTP 503)."""


_STATUS: tuple[tuple[type[DraftkeepError], int, str], ...] = (
    (InputError, 400, "invalid_request_error"),
    (DeniedError, 401, "authentication_error"),
    (ForbiddenError, 403, "permission_error"),
    (NotFoundError, 404, "not_found_error"),
    (BusyError, 429, "rate_limit_error"),
    (UnavailableError, 503, "service_unavailable_error"),
)


def error_body(error: DraftkeepError) -> tuple[int, dict[str, object]]:
    """(status, body) of an error."""
    status, kind = 500, "server_error"
    for known, its_status, its_kind in _STATUS:
        if isinstance(error, known):
            status, kind = its_status, its_kind
            break
    param = error.param if isinstance(error, InputError) else None
    return status, _body(str(error), kind, param)


def install(app: FastAPI) -> None:
    """Make every error of the app an error of this form."""

    @app.exception_handler(DraftkeepError)
    async def _ours(request: Request, error: DraftkeepError) -> JSONResponse:
        status, body = error_body(error)
        headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 429 else None
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
        # The type alone: an unexpected error's text may hold anything.
        _log.error("unexpected %s on %s", type(error).__name__, request.url.path)
        return JSONResponse(_body("internal error", "server_error", None), status_code=500)


def _first(error: RequestValidationError) -> tuple[str, str | None]:
    """The first problem, by field and rule. Pydantic's own text names rules, not input."""
    item = error.errors()[0]
    place = [part for part in item["loc"] if isinstance(part, str) and part != "body"]
    if item["type"] == "json_invalid":
        return "the body is not valid JSON", None
    param = place[0] if place else None
    rule = str(item["msg"]) if item["type"] != "value_error" else "is not allowed"
    return f"{param or 'body'}: {rule}", param


def _body(message: str, kind: str, param: str | None) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}
