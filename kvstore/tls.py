"""Mutual TLS between nodes and clients, with certificates that may be replaced while everything runs.

Both sides show a certificate and both are checked against the same authorities. A server reads its files
again for each new connection if they have changed; a client opens a new connection when they have, and the
calls on the old one end in their own time. Files that are half-written or broken are ignored until they are
whole: the last good certificates stay in use.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.rpc import transport_options

log = logging.getLogger(__name__)
LOOK_EVERY_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class TlsConfig:
    """PEM files: authorities that are trusted, and the own certificate (chain) with its key.

    ``server_name``: what servers' certificates are checked for, when it is not the host in their address.
    """

    ca_file: Path
    certificate_file: Path
    key_file: Path
    server_name: str = ""

    @classmethod
    def of(cls, files: Sequence[Path] | None) -> TlsConfig | None:
        """From a command line's (authorities, certificate, key); None when there are none."""
        if not files:
            return None
        ca, certificate, key = files
        return cls(ca_file=ca, certificate_file=certificate, key_file=key)

    def __post_init__(self) -> None:
        for name in ("ca_file", "certificate_file", "key_file"):
            object.__setattr__(self, name, Path(getattr(self, name)))


@dataclass(frozen=True)
class _Pems:
    ca: bytes
    certificate: bytes
    key: bytes


class Certificates:
    """The files' contents, read again when a file has changed. Any thread."""

    def __init__(self, config: TlsConfig) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._stamp = self._look()
        try:
            self._pems = self._read()
        except OSError as error:
            raise InvalidRequest("tls", str(error.filename), f"cannot be read: {error.strerror}") from None
        _expect_pems(self._pems, config)

    def current(self) -> tuple[_Pems, bool]:
        """The certificates to use, and whether they are others than at the last call."""
        with self._lock:
            stamp = self._look()
            if stamp == self._stamp:
                return self._pems, False
            try:
                fresh = self._read()
                _expect_pems(fresh, self.config)
            except (OSError, InvalidRequest) as error:
                log.warning("certificates not reloaded: %s", error)
                return self._pems, False
            self._stamp = stamp
            changed, self._pems = fresh != self._pems, fresh
            if changed:
                log.info("certificates reloaded")
            return fresh, changed

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        stamps = []
        for path in (self.config.ca_file, self.config.certificate_file, self.config.key_file):
            try:
                status = path.stat()
                stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
            except OSError:
                stamps.append((0, 0, 0))
        return tuple(stamps)

    def _read(self) -> _Pems:
        config = self.config
        return _Pems(
            config.ca_file.read_bytes(), config.certificate_file.read_bytes(), config.key_file.read_bytes()
        )


def server_credentials(config: TlsConfig) -> grpc.ServerCredentials:
    """Credentials of a server that admits only peers with a certificate of the authorities."""
    certificates = Certificates(config)

    def configuration(pems: _Pems) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(pems.key, pems.certificate)], root_certificates=pems.ca
        )

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        pems, changed = certificates.current()
        return configuration(pems) if changed else None

    first, _ = certificates.current()
    credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
        configuration(first),
        fetch,  # type: ignore[arg-type]  # None means "as before", which the stubs do not know
        require_client_authentication=True,
    )
    return credentials


class ChannelMaker:
    """Opens channels, secure when configured, and says when they should be opened anew."""

    def __init__(self, tls: TlsConfig | None, options: list[tuple[str, int | str]] | None = None) -> None:
        self._certificates = None if tls is None else Certificates(tls)
        self._options = transport_options().channel if options is None else options
        self._look_again_s = 0.0

    def outdated(self) -> bool:
        """Whether channels opened before show a certificate that has been replaced. Looks once a second."""
        now_s = time.monotonic()
        if self._certificates is None or now_s < self._look_again_s:
            return False
        self._look_again_s = now_s + LOOK_EVERY_S
        return self._certificates.current()[1]

    def open(self, address: str) -> Any:
        """An aio channel."""
        if self._certificates is None:
            return grpc.aio.insecure_channel(address, options=self._options)
        pems, _ = self._certificates.current()
        credentials = grpc.ssl_channel_credentials(pems.ca, pems.key, pems.certificate)
        options = list(self._options)
        if name := self._certificates.config.server_name:
            options.append(("grpc.ssl_target_name_override", name))
        return grpc.aio.secure_channel(address, credentials, options=options)


def _expect_pems(pems: _Pems, config: TlsConfig) -> None:
    """PEM form: what gRPC would only log, and then serve nobody."""
    for path, content, mark in (
        (config.ca_file, pems.ca, b"CERTIFICATE"),
        (config.certificate_file, pems.certificate, b"CERTIFICATE"),
        (config.key_file, pems.key, b"PRIVATE KEY"),
    ):
        begins = content.count(b"-----BEGIN ")
        if mark not in content or not begins or begins != content.count(b"-----END "):
            raise InvalidRequest("tls", str(path), f"must be PEM with a {mark.decode()}")
