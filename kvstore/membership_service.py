"""The membership service: holds the list of nodes, hears their renewals, tells who watches.

``python -m cedar.kvstore.membership_service --port N --state FILE``. One process for a store of any size; it
is on no request's way. When it dies the list is frozen where it was; when it comes back it goes on from its
file, or from what the nodes tell it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from cedar.kvstore.clock import Clock, SystemClock
from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.member_feed import SERVICE, MemberFeed
from cedar.kvstore.members import from_json, from_proto, to_json, to_proto
from cedar.kvstore.membership import EPOCH_STEP, RENEWALS_A_LEASE, Membership, MembershipConfig
from cedar.kvstore.rpc import transport_options
from cedar.kvstore.state_file import StateFile, StateText
from cedar.kvstore.tls import TlsConfig
from cedar.kvstore.transport import GrpcTransport, Transport
from cedar.v1 import membership_pb2 as pb

log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]


class MembershipService:
    """Embeds the service: ``await start()``, later ``await stop()``."""

    def __init__(
        self,
        config: MembershipConfig | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        state_file: Path | StateText | None = None,
        tls: TlsConfig | None = None,
        clock: Clock | None = None,
        transport: Transport | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._state = StateFile(state_file) if isinstance(state_file, Path) else state_file
        text = None if self._state is None else self._state.load()
        known = None if text is None else from_json(text)
        self.membership = Membership(
            config or MembershipConfig(),
            known,
            now_s=self._clock.monotonic_s(),
            first_epoch=max(int(self._clock.wall_s()), 1),
            own_number=(rng or random.SystemRandom()).randrange(EPOCH_STEP),
        )
        self.feed = MemberFeed(known)
        self._host = host
        self._port = port
        self._transport = transport or GrpcTransport(tls)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Serve; the address."""
        self._server = self._transport.server(transport_options().server)
        self._server.add([(SERVICE, self)])
        port = self._server.listen(self._host, self._port)
        await self._server.start()
        self._task = asyncio.get_running_loop().create_task(self._expire())
        return f"{self._host}:{port}"

    async def stop(self) -> None:
        """End; the list stays in the file."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._server.stop(0.1)

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:
        """List a node, or say why not."""
        try:
            refusal = self.membership.join(
                request.node_id,
                request.address,
                request.incarnation,
                request.weight or 1.0,
                self._clock.monotonic_s(),
                from_proto(request.known),
                draining=request.draining,
            )
        except InvalidRequest as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort returned") from None
        self._publish()
        response = pb.JoinResponse(
            list=to_proto(self.membership.list), lease_s=self.membership.config.lease_s
        )
        if refusal is not None:
            response.refused, response.retry_after_s = refusal.reason, refusal.retry_after_s
        return response

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        """Hear that a node lives."""
        known = self.membership.renew(
            request.node_id,
            request.incarnation,
            request.settled_epoch,
            self._clock.monotonic_s(),
            request.epoch,
        )
        return pb.RenewResponse(
            known=known,
            epoch=self.membership.list.epoch,
            released=self.membership.released(request.node_id),
            unsettled=self.membership.unsettled(),
        )

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveResponse:
        """Let a node go."""
        self.membership.leave(request.node_id, request.incarnation, drain=request.drain)
        self._publish()
        return pb.LeaveResponse(list=to_proto(self.membership.list))

    async def Watch(self, request: pb.WatchRequest, context: Context) -> AsyncIterator[pb.MemberList]:
        """Every newer list, for as long as the caller listens."""
        epoch = request.epoch
        while True:
            newer = await self.feed.newer(epoch)
            epoch = newer.epoch
            yield to_proto(newer)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(self.membership.config.lease_s / RENEWALS_A_LEASE)
            if gone := self.membership.expire(self._clock.monotonic_s()):
                log.warning("epoch %d: lost %s", self.membership.list.epoch, ", ".join(gone))
                self._publish()

    def _publish(self) -> None:
        if self.feed.publish(self.membership.list) and self._state is not None:
            try:
                self._state.save(to_json(self.membership.list))
            except OSError as error:
                log.warning("member list not saved: %s", error)


async def _serve(arguments: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    config = MembershipConfig(
        lease_s=arguments.lease_s,
        flap_joins=arguments.flap_joins,
        hold_s=arguments.hold_s,
        copies=arguments.copies,
    )
    service = MembershipService(
        config,
        host=arguments.host,
        port=arguments.port,
        state_file=arguments.state,
        tls=TlsConfig.of(arguments.tls),
    )
    address = await service.start()
    print(json.dumps({"address": address, "pid": os.getpid()}), flush=True)
    await stopping.wait()
    await service.stop()


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m cedar.kvstore.membership_service", description=__doc__)
    add = parser.add_argument
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0: any free port, printed at start")
    add("--state", type=Path, help="file that keeps the list over a restart")
    add("--lease-s", type=float, default=10.0, help="a node silent for this long is dropped (default 10)")
    add("--flap-joins", type=int, default=3, help="joins within ten minutes before a node is held out")
    add("--hold-s", type=float, default=600.0, help="how long it is held out (default 600)")
    add(
        "--copies",
        type=int,
        default=0,
        help="nodes that hold what is hit often (default: each as configured)",
    )
    add("--tls", nargs=3, type=Path, metavar=("CA", "CERTIFICATE", "KEY"), help="PEM files")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(_serve(parser.parse_args(argv)))
    except (InvalidRequest, OSError, RuntimeError) as error:
        print(f"membership service: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
