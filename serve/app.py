"""The HTTP app over a node: its routes, its probes and what every request passes through."""

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse

from draftkeep.serve import http_errors
from draftkeep.serve.access import NodeOf
from draftkeep.serve.admin import router as admin_router
from draftkeep.serve.api import router as api_router
from draftkeep.serve.body_limit import BodyLimit
from draftkeep.serve.node import Node

router = APIRouter()


def build_app(node: Node) -> FastAPI:
    """The app over a started node, which stays the caller's to close."""
    app = FastAPI(title="draftkeep", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.node = node
    http_errors.install(app)
    app.include_router(router)
    app.include_router(api_router)
    app.include_router(admin_router)
    app.add_middleware(BodyLimit)
    return app


@router.get("/healthz")
async def healthz(node: NodeOf) -> JSONResponse:
    """200 while the process and its engine are alive."""
    return JSONResponse({}, status_code=200 if node.alive else 503)


@router.get("/readyz")
async def readyz(node: NodeOf) -> JSONResponse:
    """200 while requests are taken."""
    return JSONResponse({}, status_code=200 if node.ready else 503)
