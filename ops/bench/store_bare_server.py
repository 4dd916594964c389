"""The yardstick of the node's RPCs: a gRPC server that does nothing but move bytes.

Run as a process of its own, like the node; prints its address and serves until it is told to stop.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
from cedar.kvstore.rpc import server_options

SERVICE = "cedar.bench.Bare"


def methods(frames: list[bytes]) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """Empty: bytes in, bytes out. Stream: as many frames as the request says. Sink: takes all, answers."""

    async def empty(request: bytes, context: Any) -> bytes:
        return b""

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        for number in range(int(request)):
            yield frames[number % len(frames)]

    async def sink(request: AsyncIterator[bytes], context: Any) -> bytes:
        total = 0
        async for message in request:
            total += len(message)
        return str(total).encode()

    return {
        "Empty": grpc.unary_unary_rpc_method_handler(empty),
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
        "Sink": grpc.stream_unary_rpc_method_handler(sink),
    }


async def serve(frame_bytes: int, frames: int) -> None:
    """Serve until SIGTERM. ``frames`` different ones, so that no cache holds what is sent."""
    server = grpc.aio.server(options=server_options())
    handler = grpc.method_handlers_generic_handler(
        SERVICE, methods([os.urandom(frame_bytes) for _ in range(frames)])
    )
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(json.dumps({"address": f"127.0.0.1:{port}"}), flush=True)
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    await stopping.wait()
    await server.stop(1.0)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2])))
