"""The cold tier: packs of pages in an object store, for longer than SSDs keep them and for new clusters.

    packs/<checksum>.pack          values and footer (``packs``), named by content
    manifests/<checksum>.json      written after its pack: the pack exists from this moment

A pack without a manifest is what a crash left: it is never read, and ``collect`` removes it after a while.
A pack holds pages of one tenant, so that a purge removes whole packs. What comes out is verified value by
value; anything damaged, cut or gone is a lost page and is counted, never an error and never an answer.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path

from cedar.kvstore.cold_manifest import Manifest, manifest_name, pack_name
from cedar.kvstore.cold_objects import ColdUnavailable, Objects
from cedar.kvstore.errors import CorruptValue
from cedar.kvstore.header import read_header
from cedar.kvstore.packs import BadPack, PackReader, PackWriter, Page

log = logging.getLogger(__name__)


class ColdTier:
    """Archive and restore over ``objects``. Blocks; keep it off an event loop's thread.

    ``counters``: archived, restored, damaged, lost, bad_manifests, bad_packs, collected, by name.
    """

    def __init__(self, objects: Objects, *, unix_s: Callable[[], float] = time.time) -> None:
        self.config = objects.config
        self.counters: Counter[str] = Counter()
        self._objects = objects
        self._unix_s = unix_s

    # ---- in ----

    def archive(self, pages: Iterable[Page]) -> Iterator[Manifest]:
        """Write pages into packs and give each pack's manifest once it is committed. ColdUnavailable.

        Pages that fail verification are counted and left out. A page may end up in several packs.
        """
        open_packs: dict[bytes, _Spool] = {}
        try:
            for page in pages:
                spool = open_packs.get(page.tenant)
                if spool is None:
                    spool = open_packs[page.tenant] = _Spool()
                try:
                    spool.add(page)
                except CorruptValue as error:
                    self.counters["damaged"] += 1
                    log.warning("page %s not archived: %s", page.key.hex(), error)
                    continue
                if spool.size >= self.config.pack_bytes:
                    yield self._commit(open_packs.pop(page.tenant), page.tenant)
            for tenant in list(open_packs):
                spool = open_packs.pop(tenant)
                if spool.values:
                    yield self._commit(spool, tenant)
        finally:
            for spool in open_packs.values():
                spool.close()

    def _commit(self, spool: _Spool, tenant: bytes) -> Manifest:
        try:
            checksum = spool.finish()
            now_s = self._unix_s()
            manifest = Manifest(
                pack=checksum,
                size=spool.size,
                values=spool.values,
                tenant=tenant,
                fingerprints=tuple(sorted(spool.fingerprints)),
                created_unix_s=now_s,
                expires_unix_s=now_s + self.config.ttl_s,
            )
            self._objects.upload(spool.path, pack_name(checksum))
            self._objects.write(manifest_name(checksum), manifest.to_bytes())
        finally:
            spool.close()
        self.counters["archived"] += manifest.values
        return manifest

    # ---- out ----

    def manifests(self) -> list[Manifest]:
        """Every committed pack that is not past its time, the oldest first. ColdUnavailable."""
        now_s = self._unix_s()
        found = []
        for item in self._objects.list("manifests"):
            manifest = self._manifest(item.name)
            if manifest is not None and manifest.expires_unix_s > now_s:
                found.append(manifest)
        return sorted(found, key=lambda manifest: (manifest.created_unix_s, manifest.pack))

    def restore(
        self, manifest: Manifest, *, keys: Container[bytes] | None = None, skip: Container[bytes] = ()
    ) -> Iterator[Page]:
        """The intact pages of a pack, of ``keys`` only if given, without those in ``skip``. ColdUnavailable.

        A pack that is gone, cut or not what its manifest says gives nothing.
        """
        name = pack_name(manifest.pack)
        try:
            if self._objects.size(name) != manifest.size:
                raise BadPack("its size is not that of its manifest")
            reader = PackReader(lambda at, length: self._range(name, at, length), manifest.size)
        except (FileNotFoundError, BadPack) as error:
            self.counters["bad_packs"] += 1
            self.counters["lost"] += manifest.values
            log.warning("pack %s cannot be restored: %s", manifest.pack, error)
            return
        reader.pages = [p for p in reader.pages if (keys is None or p.key in keys) and p.key not in skip]
        elapsed_s = max(self._unix_s() - manifest.created_unix_s, 0.0)
        values = reader.read(batch_bytes=self.config.read_bytes)
        for done in range(len(reader.pages)):
            try:
                packed, value = next(values)
            except FileNotFoundError:
                self.counters["lost"] += len(reader.pages) - done
                return
            if isinstance(value, CorruptValue):
                self.counters["damaged"] += 1
                log.warning("page %s of pack %s: %s", packed.key.hex(), manifest.pack, value)
                continue
            self.counters["restored"] += 1
            yield Page(packed.key, value, packed.page_index, packed.tenant, packed.age_s + elapsed_s)

    def _range(self, name: str, offset: int, length: int) -> bytes:
        """Bytes of a pack; asked for once more when fewer came. Still fewer is for the reader to judge."""
        data = self._objects.read(name, offset, offset + length)
        if len(data) != length:
            data = self._objects.read(name, offset, offset + length)
        return data[:length]

    # ---- upkeep ----

    def purge(self, tenant: bytes) -> int:
        """Remove every pack of a tenant; how many. ColdUnavailable: call again until it succeeds."""
        removed = 0
        for item in self._objects.list("manifests"):
            manifest = self._manifest(item.name)
            if manifest is not None and manifest.tenant == tenant:
                self._remove(manifest.pack)
                removed += 1
        return removed

    def collect(self) -> int:
        """Remove packs past their time and packs that were never committed; how many. ColdUnavailable."""
        now_s = self._unix_s()
        removed = 0
        for item in self._objects.list("manifests"):
            manifest = self._manifest(item.name)
            if manifest is not None and manifest.expires_unix_s <= now_s:
                self._remove(manifest.pack)
                removed += 1
        for item in self._objects.list("packs"):
            checksum = item.name.rsplit("/", 1)[-1].removesuffix(".pack")
            if self._is_litter(item.name, checksum, now_s):
                removed += self._objects.delete(item.name)
        self.counters["collected"] += removed
        return removed

    def _is_litter(self, name: str, checksum: str, now_s: float) -> bool:
        """Whether a pack has no manifest, asked by name (a list may be stale), and is no upload of today."""
        try:
            self._objects.read(manifest_name(checksum))
        except FileNotFoundError:
            try:
                written_s = self._objects.modified_s(name)
            except FileNotFoundError:
                return False
            return written_s is not None and written_s + self.config.grace_s <= now_s
        return False

    def _remove(self, checksum: str) -> None:
        self._objects.delete(manifest_name(checksum))  # first: a pack without manifest is never read
        self._objects.delete(pack_name(checksum))

    def _manifest(self, name: str) -> Manifest | None:
        try:
            return Manifest.from_bytes(self._objects.read(name), name)
        except FileNotFoundError:
            return None  # listed, but gone
        except ValueError as error:
            self.counters["bad_manifests"] += 1
            log.warning("%s", error)
            return None


class _Spool:
    """A pack being built in a temporary file."""

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="cedar-pack-", suffix=".part")  # noqa: SIM115
        self._writer = PackWriter(self._file)
        self.path = Path(self._file.name)
        self.fingerprints: set[bytes] = set()

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._writer.size

    @property
    def values(self) -> int:
        """Values so far."""
        return self._writer.values

    def add(self, page: Page) -> None:
        """Append a page. CorruptValue."""
        self._writer.add(page)
        self.fingerprints.add(read_header(page.value).fingerprint)

    def finish(self) -> str:
        """Make it whole; its checksum in hex."""
        checksum = self._writer.finish()
        self._file.flush()
        return checksum.hex()

    def close(self) -> None:
        """Delete the file."""
        self._file.close()


__all__ = ["ColdTier", "ColdUnavailable", "Manifest"]
