"""Mutual TLS: who has no certificate of the authorities gets nothing; certificates change while all runs."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cedar.kvstore import tls as tls_module
from cedar.kvstore.client import StoreClient
from cedar.kvstore.cluster_client import ClusterClient
from cedar.kvstore.cluster_config import PeerConfig
from cedar.kvstore.config import MIB, ClientConfig, NodeConfig, SsdConfig, WindowConfig
from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.member_feed import ServiceFeed
from cedar.kvstore.membership_service import MembershipService
from cedar.kvstore.node import StoreNode
from cedar.kvstore.tls import Certificates, TlsConfig
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)
QUICK = ClientConfig(match_timeout_s=2.0, stall_timeout_s=2.0, put_timeout_s=2.0, breaker_failures=1000)


class Authority:
    """A certificate authority made for the test."""

    def __init__(self, name: str) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = (
            self._builder(self.name, self.key.public_key(), NOW + 30 * DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self.key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(
        self, directory: Path, *, ca: bytes = b"", ends: datetime.datetime = NOW + 2 * DAY
    ) -> TlsConfig:
        """Write a certificate for this machine, its key, and the authorities it trusts."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "store")])
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        certificate = (
            self._builder(subject, key.public_key(), ends)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .sign(self.key, hashes.SHA256())
        )
        directory.mkdir(exist_ok=True)
        config = TlsConfig(
            ca_file=directory / "ca.pem",
            certificate_file=directory / "cert.pem",
            key_file=directory / "key.pem",
        )
        config.ca_file.write_bytes(ca or self.pem)
        config.key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        config.certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return config

    def _builder(self, subject: Any, key: Any, ends: datetime.datetime) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - 10 * DAY)
            .not_valid_after(ends)
        )


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority("cedar test")


@pytest.fixture(scope="module")
def foreign() -> Authority:
    return Authority("somebody else")


@pytest.fixture
def quick_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_module, "LOOK_EVERY_S", 0.0)


def node_of(directory: Path, tls: TlsConfig | None, **peers: Any) -> StoreNode:
    config = NodeConfig(
        ssd=SsdConfig(directory=directory, capacity_bytes=64 * MIB, reserve_bytes=MIB),
        window=WindowConfig(budget_bytes=MIB),
        tls=tls,
    )
    return StoreNode(config, peers=PeerConfig(retry_s=0.1, **peers))


async def stores(address: str, tls: TlsConfig | None, chains: Any, salt: int = 0) -> bool:
    """Whether a client with these certificates can store and read a page."""
    client = StoreClient(address, fingerprint=chains.fingerprint, config=QUICK, tls=tls)
    keys = chains.keys(1, salt=salt)
    counts = await client.put_pages(keys, [chains.value(keys[0])])
    match = await client.match(chains.root(), keys)
    await client.close()
    assert (counts.refused == 0) == (match.pages == 1)
    return match.pages == 1


async def test_only_certificates_of_the_authority_are_served(
    tmp_path: Path, chains: Any, authority: Authority, foreign: Authority
) -> None:
    node = node_of(tmp_path / "node", authority.issue(tmp_path / "server"))
    address = await node.start()
    try:
        assert await stores(address, authority.issue(tmp_path / "client"), chains)
        assert not await stores(address, None, chains), "without TLS"
        assert not await stores(address, foreign.issue(tmp_path / "other", ca=authority.pem), chains)
        assert not await stores(address, foreign.issue(tmp_path / "wary"), chains), (
            "the client trusts another"
        )
        expired = authority.issue(tmp_path / "expired", ends=NOW - DAY)
        assert not await stores(address, expired, chains)
    finally:
        await node.stop(0.1)


async def test_a_server_with_an_expired_certificate_is_not_trusted(
    tmp_path: Path, chains: Any, authority: Authority
) -> None:
    node = node_of(tmp_path / "node", authority.issue(tmp_path / "server", ends=NOW - DAY))
    address = await node.start()
    try:
        assert not await stores(address, authority.issue(tmp_path / "client"), chains)
    finally:
        await node.stop(0.1)


async def test_a_server_is_checked_for_its_name(tmp_path: Path, chains: Any, authority: Authority) -> None:
    node = node_of(tmp_path / "node", authority.issue(tmp_path / "server"))
    address = await node.start()
    client = authority.issue(tmp_path / "client")
    try:
        for name, served in (("elsewhere", False), ("localhost", True)):
            named = TlsConfig(
                ca_file=client.ca_file,
                certificate_file=client.certificate_file,
                key_file=client.key_file,
                server_name=name,
            )
            assert await stores(address, named, chains) is served
    finally:
        await node.stop(0.1)


@pytest.mark.usefixtures("quick_look")
async def test_all_certificates_change_without_a_restart(
    tmp_path: Path, chains: Any, authority: Authority, foreign: Authority, eventually: Callable[..., Any]
) -> None:
    """The move to another authority: trust both, change certificates, trust the new one alone."""
    server, mine = authority.issue(tmp_path / "server"), authority.issue(tmp_path / "client")
    node = node_of(tmp_path / "node", server)
    address = await node.start()
    client = StoreClient(address, fingerprint=chains.fingerprint, config=QUICK, tls=mine)
    keys = chains.keys(30)

    async def works(page: int) -> bool:
        counts = await client.put_pages(keys[page : page + 1], [chains.value(keys[page])])
        return counts.stored == 1

    try:
        assert await works(0)
        newcomer = foreign.issue(tmp_path / "newcomer", ca=authority.pem + foreign.pem)
        assert not await stores(address, newcomer, chains, 1)
        server.ca_file.write_bytes(authority.pem + foreign.pem)
        assert await stores(address, newcomer, chains, 2)
        assert await works(1), "the old connection goes on"
        mine.ca_file.write_bytes(authority.pem + foreign.pem)
        first_channel = client._channel
        assert await works(2)
        assert client._channel is not first_channel, "connected anew"
        foreign.issue(tmp_path / "server", ca=authority.pem + foreign.pem)
        assert await works(3)
        assert await stores(address, newcomer, chains, 3)
        foreign.issue(tmp_path / "client")
        assert await works(4)
        server.ca_file.write_bytes(foreign.pem)
        assert await works(5)
        assert await stores(address, foreign.issue(tmp_path / "pure"), chains, 4)
        assert not await stores(address, authority.issue(tmp_path / "late"), chains, 5)
    finally:
        await client.close()
        await node.stop(0.1)


def test_broken_files_change_nothing(tmp_path: Path, authority: Authority) -> None:
    config = authority.issue(tmp_path / "x")
    certificates = Certificates(config)
    good = config.certificate_file.read_bytes()
    before, changed = certificates.current()
    assert not changed
    for content in (b"", good[: len(good) // 2], b"nonsense"):
        config.certificate_file.write_bytes(content)
        assert certificates.current() == (before, False)
    config.certificate_file.unlink()
    assert certificates.current() == (before, False)
    authority.issue(tmp_path / "x")
    after, changed = certificates.current()
    assert changed
    assert after != before
    assert certificates.current() == (after, False)


def test_files_that_are_missing_at_the_start_are_named(tmp_path: Path, authority: Authority) -> None:
    config = authority.issue(tmp_path / "x")
    config.key_file.unlink()
    with pytest.raises(InvalidRequest, match=r"key\.pem"):
        Certificates(config)
    config.key_file.write_bytes(b"not a key")
    with pytest.raises(InvalidRequest, match="PRIVATE KEY"):
        Certificates(config)


async def test_a_whole_cluster_behind_certificates(
    tmp_path: Path, chains: Any, authority: Authority, foreign: Authority, eventually: Callable[..., Any]
) -> None:
    """Service, nodes and clients speak mutual TLS; a node of another authority gets in nowhere."""
    tls = authority.issue(tmp_path / "tls")
    service = MembershipService(tls=tls)
    membership = await service.start()
    nodes = [node_of(tmp_path / name, tls, membership=membership, node_id=name) for name in "ab"]
    stranger_tls = foreign.issue(tmp_path / "foreign")
    stranger = node_of(tmp_path / "s", stranger_tls, membership=membership, node_id="stranger")
    client = ClusterClient(ServiceFeed(membership, tls=tls), fingerprint=chains.fingerprint, tls=tls)
    try:
        await nodes[0].start()
        keys = chains.keys(64)
        await eventually(lambda: len(service.membership.list.members) == 1)
        counts = await client.put_pages(keys, [chains.value(key) for key in keys])
        assert counts.stored == 64
        await asyncio.gather(nodes[1].start(), stranger.start())
        await eventually(lambda: len(client.feed.current.members) == 2)
        await eventually(lambda: nodes[1].part.rebalance.settled_epoch == service.membership.list.epoch)
        assert 0 < sum(nodes[1].ssd.held(keys)) < 64
        assert (await client.match(chains.root(), keys)).pages == 64
        assert (await client.purge(b"someone")).unreachable == ()
        assert {m.node_id for m in service.membership.list.members} == {"a", "b"}
    finally:
        await client.close()
        for node in (*nodes, stranger):
            await node.stop(0.1)
        await service.stop()
