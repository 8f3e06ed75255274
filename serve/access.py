"""Who may call which route: the node behind the app, and the tenant behind an API key."""

from typing import Annotated

from fastapi import Depends, Request

from draftkeep.errors import DeniedError
from draftkeep.policies.tenant import TenantPolicy
from draftkeep.serve.bearer import bearer_key
from draftkeep.serve.node import Node


def node_of(request: Request) -> Node:
    """The node behind the app."""
    node: Node = request.app.state.node
    return node


def tenant_of(request: Request, node: Annotated[Node, Depends(node_of)]) -> TenantPolicy:
    """The tenant whose key the request carries; DeniedError otherwise."""
    key = bearer_key(request)
    if not key:
        raise DeniedError("no API key; send it as Authorization: Bearer KEY")
    return node.tenants.authenticate(key)


NodeOf = Annotated[Node, Depends(node_of)]
TenantOf = Annotated[TenantPolicy, Depends(tenant_of)]
ChatTenant = Annotated[TenantPolicy, Depends(tenant_of)]
CompletionsTenant = Annotated[TenantPolicy, Depends(tenant_of)]
