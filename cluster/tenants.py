"""From an API key to a tenant, and from a tenant to its domain in the page store.

The domain (``kvstore.keys.tenant_domain``) is an HMAC of the name under the server's secret: it salts the
root of every key chain, so
tenants never share a page and cannot guess each other's keys. It never comes from the client.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from cedar.cluster.config import AuthSettings
from cedar.cluster.errors import ConfigError, Unauthenticated
from cedar.kvstore.keys import tenant_domain

SECRET_BYTES = 32


@dataclass(frozen=True)
class Tenant:
    """``domain``: 32 bytes."""

    name: str
    domain: bytes


class Tenants:
    """Knows the keys. Compares digests of keys, so that timing tells nothing about them."""

    def __init__(
        self, secret: bytes, *, default: str = "default", keys: Mapping[str, str] | None = None
    ) -> None:
        if len(secret) < 16:
            raise ConfigError(f"gateway.auth.secret_file: {len(secret)} bytes (at least 16)")
        self._secret = secret
        self._default = self._tenant(default)
        self._by_digest = {_digest(key): self._tenant(name) for key, name in (keys or {}).items()}
        self._open = keys is None

    def of(self, metadata: Iterable[tuple[str, str | bytes]]) -> Tenant:
        """The caller's tenant. ``metadata``: of the call; ``authorization: Bearer KEY`` or ``x-api-key:
        KEY``."""
        if self._open:
            return self._default
        for name, value in metadata:
            text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            if name == "authorization" and text[:7].lower() == "bearer ":
                text = text[7:].strip()
            elif name != "x-api-key":
                continue
            tenant = self._by_digest.get(_digest(text))
            if tenant is None:
                raise Unauthenticated("the API key is not known here")
            return tenant
        raise Unauthenticated("an API key is needed: metadata authorization 'Bearer KEY', or x-api-key")

    def _tenant(self, name: str) -> Tenant:
        return Tenant(name, tenant_domain(self._secret, name))


def load_keys(settings: AuthSettings) -> dict[str, str] | None:
    """API key to tenant name, None when none are configured."""
    if settings.api_keys_file is None:
        return None
    path = Path(settings.api_keys_file)
    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"gateway.auth.api_keys_file: {path}: {error}") from error
    if (
        not isinstance(data, dict)
        or not data
        or not all(isinstance(x, str) and x for p in data.items() for x in p)
    ):
        raise ConfigError(
            f"gateway.auth.api_keys_file: {path}: a mapping of API keys to tenant names is needed"
        )
    return data


def load_secret(settings: AuthSettings, store_directory: str | None) -> bytes:
    """The secret: from its file, else made once beside the store, else good for this run only."""
    if settings.secret_file is not None:
        path = Path(settings.secret_file)
        try:
            return path.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"gateway.auth.secret_file: {path}: {error.strerror}") from error
    if store_directory is None:
        return secrets.token_bytes(SECRET_BYTES)
    path = Path(store_directory) / "tenant-secret"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        # Several processes may want it in the same moment: whole under its name, or not there.
        descriptor, fresh = tempfile.mkstemp(prefix=".tenant-secret-", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
        os.unlink(fresh)
    return path.read_bytes()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8")).digest()
