"""The bearer key of a request."""

from fastapi import Request


def bearer_key(request: Request) -> str:
    """The key in `Authorization: Bearer KEY`; empty where there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
