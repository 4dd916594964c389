"""The list of a store's nodes: its membership service, in the directory's process.

When that process dies the list is frozen where it was, and everything goes on. Ray starts it again on the
same machine, where the service takes the list from its file and the port it had; whoever follows the list
just connects again. Should the port be taken meanwhile it listens on another one, which the directory's
next views name.
"""

from __future__ import annotations

import logging
from pathlib import Path

from cedar.cluster.config import ClusterConfig
from cedar.cluster.loop_thread import LoopThread
from cedar.cluster.worker_configs import MEMBERSHIP, store_tls
from cedar.kvstore.membership import MembershipConfig
from cedar.kvstore.membership_service import MembershipService

log = logging.getLogger(__name__)


class StoreMembership:
    """``folder``: keeps the list and the port; ``host``: to listen on, resolved.

    ``target``: how the store is reached (``kvstore.connect``), once ``start`` is done.
    """

    def __init__(self, config: ClusterConfig, folder: str, host: str) -> None:
        self._config = config
        self._folder = Path(folder)
        self._host = host
        self._service: MembershipService | None = None
        self.target = ""

    async def start(self) -> None:
        """Serve, under the port of before if that is free."""
        self._folder.mkdir(parents=True, exist_ok=True)
        port_file = self._folder / "membership.port"
        try:
            address = await self._serve(int(port_file.read_text("utf-8")))
        except (OSError, ValueError, RuntimeError) as error:
            if port_file.exists():
                log.warning("the store's member list moves to another port: %s", error)
            address = await self._serve(0)
        fresh = port_file.with_suffix(".new")
        fresh.write_text(address.rpartition(":")[2], "utf-8")
        fresh.replace(port_file)
        self.target = MEMBERSHIP + address

    async def stop(self) -> None:
        """End; the list stays in its file."""
        if self._service is not None:
            await self._service.stop()
            self._service = None

    async def _serve(self, port: int) -> str:
        service = self._make(port)
        address = await service.start()
        self._service = service
        return address

    def _make(self, port: int) -> MembershipService:
        state_file = self._folder / "members.json"
        try:
            return self._service_of(state_file, port)
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read and is left aside; the nodes know the list: %s", state_file, error)
            state_file.replace(state_file.with_suffix(".damaged"))
            return self._service_of(state_file, port)

    def _service_of(self, state_file: Path, port: int) -> MembershipService:
        return MembershipService(
            MembershipConfig(lease_s=self._config.store.lease_s, copies=self._config.store.copies),
            host=self._host,
            port=port,
            state_file=state_file,
            tls=store_tls(self._config),
        )


def started(config: ClusterConfig, folder: str, host: str) -> StoreMembership:
    """Start it on a thread of its own, from a process whose event loop is another's."""
    membership = StoreMembership(config, folder, host)
    LoopThread("store-membership").run(membership.start())
    return membership
