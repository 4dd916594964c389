"""Keeps Serve's own gRPC server of each replica on loopback.

Serve opens it on all interfaces for calls through handles, with pickled metadata and no authentication.
Nothing here goes through a handle, so it may as well be out of reach. Serve has no option for it;
it binds after the replica's constructor, which is where this is called.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)
ALL_INTERFACES = "[::]"
LOOPBACK = "127.0.0.1"


def keep_on_loopback() -> None:
    """Call in a replica's process before Serve's server starts. Idempotent."""
    from ray.serve._private import replica

    bind: Any = getattr(replica, "add_port_to_grpc_server", None)
    if bind is None:
        logger.warning("this Serve opens its port in another way; it may listen on all interfaces")
        return
    if getattr(bind, "loopback", False):
        return

    def bind_loopback(server: Any, address: str) -> Any:
        return bind(server, address.replace(ALL_INTERFACES, LOOPBACK))

    bind_loopback.loopback = True  # type: ignore[attr-defined]
    replica.add_port_to_grpc_server = bind_loopback
