"""Who may call which route: the node behind the app, and the tenant behind an API key.

All of it is quick, hence async: a plain function would cost every request a trip to a thread.
"""

import hashlib
import hmac
from typing import Annotated

from fastapi import Depends, Request

from draftkeep.config import Scope
from draftkeep.errors import DeniedError, ForbiddenError, UnavailableError
from draftkeep.policies.tenant import TenantPolicy
from draftkeep.serve.http.bearer import bearer_key
from draftkeep.serve.node import Node


async def node_of(request: Request) -> Node:
    """The node, or UnavailableError, which says why, for a request that came before it started."""
    node: Node | None = request.state.node
    if node is None:
        raise UnavailableError(f"{request.app.state.waits_for}; try again later")
    return node


NodeOf = Annotated[Node, Depends(node_of)]


class RequireKey:
    """A dependency: the tenant whose key the request carries, which must have `scope`.

    DeniedError for no key or a wrong one, ForbiddenError for one without the scope.
    """

    def __init__(self, scope: Scope | None) -> None:
        self._scope = scope

    async def __call__(self, request: Request, node: NodeOf) -> TenantPolicy:
        key = bearer_key(request)
        if not key:
            raise DeniedError("no API key; send it as Authorization: Bearer KEY")
        tenant = node.tenants.authenticate(key, self._scope)
        # For the request's line in the log.
        request.state.tenant = tenant.name
        return tenant


TenantOf = Annotated[TenantPolicy, Depends(RequireKey(None))]
ChatTenant = Annotated[TenantPolicy, Depends(RequireKey("chat"))]
CompletionsTenant = Annotated[TenantPolicy, Depends(RequireKey("completions"))]


async def admin_node(request: Request, node: NodeOf) -> Node:
    """The node, for whoever holds the administrator's key; ForbiddenError otherwise."""
    if not _is_admin(request, node):
        raise ForbiddenError(
            "this route needs the administrator's key; set serve.admin_key_sha256 and send the key "
            "as Authorization: Bearer KEY"
        )
    return node


async def metrics_node(request: Request, node: NodeOf) -> Node:
    """The node, for whoever may read its metrics.

    That is the administrator, a key with the scope `metrics`, and everyone where the configuration
    says so. Raises as `RequireKey` does.
    """
    if not node.open_metrics and not _is_admin(request, node):
        await RequireKey("metrics")(request, node)
    return node


AdminNode = Annotated[Node, Depends(admin_node)]
MetricsNode = Annotated[Node, Depends(metrics_node)]


def _is_admin(request: Request, node: Node) -> bool:
    key, expected = bearer_key(request), node.admin_key_sha256
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
    return bool(expected and key) and hmac.compare_digest(digest, expected)
