"""The HTTP app over a node: its routes, its probes and what every request passes through."""

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from draftkeep import __version__
from draftkeep.serve.exposition import CONTENT_TYPE
from draftkeep.serve.http import http_errors
from draftkeep.serve.http.access import MetricsNode
from draftkeep.serve.http.admin import router as admin_router
from draftkeep.serve.http.api import router as api_router
from draftkeep.serve.http.body_limit import BodyLimit
from draftkeep.serve.http.track_requests import TrackRequests
from draftkeep.serve.node import Node

# What a probe that is told no hears of when to come back.
PROBE_AGAIN_S = 5
router = APIRouter()


def build_app(node: Node | None = None) -> FastAPI:
    """The app over a started node, which stays the caller's to close.

    None while the node is being loaded: put it into `app.state.node` once it has started, and into
    `app.state.waits_for` what it waits for, when that is no longer its model.
    """
    app = FastAPI(title="draftkeep", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.node = node
    app.state.waits_for = "the model is being loaded"
    http_errors.install(app)
    app.include_router(router)
    app.include_router(api_router)
    app.include_router(admin_router)
    app.add_middleware(BodyLimit)
    app.add_middleware(TrackRequests)
    return app


@router.get("/healthz")
@router.get("/health")
async def healthz(request: Request) -> Response:
    """200 while the process lives and its engine neither died nor stalled."""
    node: Node | None = request.app.state.node
    return _probe(node is None or node.alive)


@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """200 while requests are taken: not while the node is being loaded, nor once it stops."""
    node: Node | None = request.app.state.node
    return _probe(node is not None and node.ready)


@router.get("/version")
async def version() -> Response:
    """Which draftkeep this is."""
    return JSONResponse({"version": __version__})


@router.get("/metrics")
async def metrics(node: MetricsNode) -> Response:
    """The node's counts, for Prometheus."""
    # In a thread: the page takes milliseconds, and every stream would wait for them.
    page = await run_in_threadpool(node.exposition.render)
    return Response(page, media_type=CONTENT_TYPE)


def _probe(well: bool) -> Response:
    if well:
        return JSONResponse({})
    return JSONResponse({}, status_code=503, headers={"Retry-After": str(PROBE_AGAIN_S)})
