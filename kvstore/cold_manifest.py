"""The manifest of a pack: a small JSON object that says the pack is whole, what it holds, and until when."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

import xxhash

MANIFEST_FORMAT: Final = 1
_CHECKSUM = re.compile(r"[0-9a-f]{32}")


def pack_name(checksum: str) -> str:
    """Object name of a pack."""
    return f"packs/{checksum}.pack"


def manifest_name(checksum: str) -> str:
    """Object name of its manifest."""
    return f"manifests/{checksum}.json"


@dataclass(frozen=True)
class Manifest:
    """A committed pack. ``pack``: checksum of all its bytes, in hex, which is its name."""

    pack: str
    size: int
    values: int
    tenant: bytes
    fingerprints: tuple[bytes, ...]
    created_unix_s: float
    expires_unix_s: float

    def to_bytes(self) -> bytes:
        """As JSON, with a checksum over the rest."""
        body = {
            "format": MANIFEST_FORMAT,
            "pack": self.pack,
            "bytes": self.size,
            "values": self.values,
            "tenant": self.tenant.hex(),
            "fingerprints": [fingerprint.hex() for fingerprint in self.fingerprints],
            "created_unix_s": self.created_unix_s,
            "expires_unix_s": self.expires_unix_s,
        }
        return _canonical(body | {"checksum": _checksum(body)})

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Manifest:
        """Read a manifest named ``name``. ValueError when it is damaged or belongs to another name."""
        try:
            body: dict[str, Any] = json.loads(data)
            checksum = body.pop("checksum")
            if checksum != _checksum(body):
                raise ValueError("checksum differs")
            if body["format"] != MANIFEST_FORMAT:
                raise ValueError(f"format {body['format']}, this build reads {MANIFEST_FORMAT}")
            pack = str(body["pack"])
            if not _CHECKSUM.fullmatch(pack) or manifest_name(pack) != name:
                raise ValueError("it is another pack's")
            return cls(
                pack=pack,
                size=int(body["bytes"]),
                values=int(body["values"]),
                tenant=bytes.fromhex(body["tenant"]),
                fingerprints=tuple(bytes.fromhex(text) for text in body["fingerprints"]),
                created_unix_s=float(body["created_unix_s"]),
                expires_unix_s=float(body["expires_unix_s"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{name}: not a manifest: {error}") from None


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _checksum(body: dict[str, Any]) -> str:
    return str(xxhash.xxh3_128_hexdigest(_canonical(body)))
