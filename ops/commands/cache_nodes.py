"""Which store nodes a ``cedar cache`` command talks to, whose pages it means, and what writes to them."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..exits import CommandError, Exit

if TYPE_CHECKING:
    from cedar.cluster.config import ClusterConfig
    from cedar.cluster.state_file import ClusterState
    from cedar.kvstore.admin_client import AdminClient
    from cedar.kvstore.cold import ColdTier
    from cedar.kvstore.put import PutCounts
    from cedar.kvstore.tls import TlsConfig


T = TypeVar("T")


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which store is meant."""
    group = parser.add_argument_group("which store")
    group.add_argument("--cluster", metavar="NAME", help="a cluster started here (default: the only one)")
    group.add_argument(
        "--node", action="append", default=[], metavar="HOST:PORT", help="store nodes by address; repeat it"
    )
    group.add_argument(
        "--tls", nargs=3, type=Path, metavar=("CA", "CERTIFICATE", "KEY"),
        help="PEM files, for mutual TLS (default: those of the cluster's configuration)",
    )  # fmt: skip


def add_tenant(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add the options that say whose pages are meant."""
    group = parser.add_argument_group("whose pages")
    who = group.add_mutually_exclusive_group(required=required)
    who.add_argument("--tenant", metavar="NAME", help="a tenant, by name")
    who.add_argument("--tenant-domain", metavar="HEX", help="by its domain, 64 hex digits")
    group.add_argument(
        "--secret-file", type=Path, metavar="FILE",
        help="what domains are derived with (default: the cluster's own, where it can be read)",
    )  # fmt: skip


def open_cold(url: str) -> ColdTier:
    """The cold tier in the folder that fsspec opens by ``url``."""
    from cedar.kvstore.cold import ColdTier
    from cedar.kvstore.cold_objects import ColdConfig, Objects

    return ColdTier(Objects(ColdConfig(url=url)))


class PagePutter(Protocol):
    """What pages are written through: the client of one node or of several."""

    async def put_pages(
        self, keys: Sequence[bytes], values: Sequence[bytes], *, first_page: int = 0, tenant: bytes = b""
    ) -> PutCounts:
        """Store sealed values of consecutive pages."""

    async def close(self) -> None:
        """Close the connections."""


@dataclass(frozen=True)
class Target:
    """The store that the options name. ``state``: of its cluster, when they name one."""

    addresses: tuple[str, ...]
    state: ClusterState | None = None
    tls: TlsConfig | None = None
    secret_file: Path | None = None

    @classmethod
    def find(cls, arguments: argparse.Namespace) -> Target:
        """From the options. ClusterNotFound; CommandError when the cluster runs without a store."""
        from cedar.kvstore.tls import TlsConfig

        tls = TlsConfig.of(arguments.tls)
        secret_file = getattr(arguments, "secret_file", None)
        if arguments.node:
            if arguments.cluster:
                raise CommandError("--node and --cluster: one of them says which store is meant")
            return cls(tuple(arguments.node), None, tls, secret_file)
        from cedar.cluster.state_file import find

        state = find(arguments.cluster)
        addresses = tuple(entry.address for entry in state.workers if entry.stage == "store")
        if not addresses:
            raise CommandError(f"cluster {state.name!r} runs without a store", Exit.UNREACHABLE)
        target = cls(addresses, state, tls, secret_file)
        if tls is None:
            from cedar.cluster.worker_configs import store_tls

            target = replace(target, tls=store_tls(target.config))
        return target

    def admin(self) -> AdminClient:
        """A client for operators."""
        from cedar.kvstore.admin_client import AdminClient

        return AdminClient(self.addresses, tls=self.tls)

    def ask(self, question: Callable[[AdminClient], Awaitable[T]]) -> T:
        """What the nodes answer to one question."""

        async def asked() -> T:
            async with self.admin() as admin:
                return await question(admin)

        return asyncio.run(asked())

    async def node(self, name: str) -> Target:
        """One of the nodes, by its address or by what it calls itself. CommandError when there is none."""
        if name not in self.addresses:
            names = await self.names()
            if name not in names:
                known = ", ".join(f"{address} ({node_id})" for node_id, address in names.items())
                raise CommandError(f"{name}: no such store node; there are {known}")
            name = names[name]
        return replace(self, addresses=(name,))

    async def putter(self) -> PagePutter:
        """What to write pages through: each goes to the node that owns it."""
        if len(self.addresses) == 1:
            from cedar.kvstore.client import StoreClient

            return StoreClient(self.addresses[0], tls=self.tls)
        from cedar.kvstore.cluster_client import ClusterClient
        from cedar.kvstore.member_feed import MemberFeed
        from cedar.kvstore.members import Member, MemberList

        names = await self.names()
        members = tuple(Member(node_id, address) for node_id, address in names.items())
        return ClusterClient(MemberFeed(MemberList(0, members)), tls=self.tls)

    async def names(self) -> dict[str, str]:
        """Addresses by what the nodes call themselves: pages are placed by these names."""
        async with self.admin() as admin:
            return {answer.node_id: address for address, answer in (await admin.top()).items()}

    @cached_property
    def config(self) -> ClusterConfig:
        """The cluster's configuration. CommandError when only nodes are named."""
        if self.state is None:
            raise CommandError("this needs a cluster's configuration: name it with --cluster, not --node")
        import yaml
        from cedar.cluster.config_load import parse_config

        return parse_config(yaml.safe_load(self.state.config_yaml))

    async def tenant(self, arguments: argparse.Namespace, *, default: bool = False) -> bytes:
        """The domain of the tenant that the options name; ``default``: else of the cluster's default one."""
        if arguments.tenant_domain:
            try:
                domain = bytes.fromhex(arguments.tenant_domain)
            except ValueError:
                domain = b""
            if len(domain) != 32:
                raise CommandError(f"--tenant-domain: {arguments.tenant_domain!r} is not 64 hex digits")
            return domain
        name = arguments.tenant
        if name is None:
            if not default:
                return b""
            name = self.config.gateway.auth.default_tenant
        from cedar.kvstore.keys import tenant_domain

        return tenant_domain(await self._secret(), name)

    async def _secret(self) -> bytes:
        """What domains are derived with: the option's, the configuration's, or the one beside the pages."""
        if self.secret_file is not None:
            return self.secret_file.read_bytes().strip()
        if self.state is not None and self.config.gateway.auth.secret_file is not None:
            return Path(self.config.gateway.auth.secret_file).read_bytes().strip()
        async with self.admin() as admin:
            nodes = await admin.top()
        for answer in nodes.values():
            beside = Path(answer.directory).parent / "tenant-secret"
            try:
                return beside.read_bytes()
            except OSError:
                continue
        raise CommandError("the secret behind tenants' names cannot be read here; name it with --secret-file")
