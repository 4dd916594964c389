"""The cold tier over an object store that fails in every way: no wrong byte, no hang, no lost archive."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from cedar.kvstore.cold import ColdTier
from cedar.kvstore.cold_manifest import Manifest, manifest_name, pack_name
from cedar.kvstore.cold_objects import ColdConfig, ColdUnavailable, Objects
from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.packs import Page
from fsspec.implementations.memory import MemoryFileSystem

TENANT = b"t" * 32


class FaultyStore(MemoryFileSystem):
    """A bucket with switches for what goes wrong."""

    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.store = {}
        self.pseudo_dirs = [""]
        self.down = False
        self.calls = 0
        self.fail_next = 0
        self.fail_manifest = False
        self.cut_bytes = 0
        self.flip = False
        self.hang = threading.Event()
        self.hang.set()
        self.frozen_list: list[Any] | None = None

    def _call(self) -> None:
        self.calls += 1
        self.hang.wait(10)
        if self.down or self.fail_next > 0:
            self.fail_next -= 1
            raise OSError("503 Slow Down")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        self._call()
        data = super().cat_file(path, start, end, **kwargs)
        if path.endswith(".pack"):
            data = data[: max(len(data) - self.cut_bytes, 0)]
            if self.flip and len(data) > 1000:
                data = data[:700] + bytes([data[700] ^ 4]) + data[701:]
        return bytes(data)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self._call()
        if self.fail_manifest:
            raise OSError("connection reset")
        super().pipe_file(path, value, mode=mode, **kwargs)

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        self._call()
        super().pipe_file(rpath, Path(lpath).read_bytes())

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        self._call()
        found = super().ls(path, detail=detail, **kwargs)
        return found if self.frozen_list is None else self.frozen_list


class Bucket:
    """A cold tier over a faulty store, on a clock that the test moves."""

    def __init__(self, **changes: Any) -> None:
        settings = {"pack_bytes": 16_000, "attempts": 3, "retry_wait_s": 0.001, "breaker_open_s": 0.05}
        self.config = ColdConfig(url="memory://bucket/cold", **settings | changes)
        self.faults = FaultyStore()
        self.now_s = time.time()
        self.tier = self.another()

    def another(self) -> ColdTier:
        objects = Objects(self.config, connect=lambda _: (self.faults, "/bucket/cold"))
        return ColdTier(objects, unix_s=lambda: self.now_s)

    def restored(self) -> dict[bytes, bytes]:
        return {p.key: bytes(p.value) for m in self.tier.manifests() for p in self.tier.restore(m)}

    def names(self, folder: str) -> set[str]:
        return {path for path in self.faults.store if f"/{folder}/" in path}


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture
def pages(chains) -> list[Page]:
    return [Page(k, chains.value(k), i, TENANT, 10.0) for i, k in enumerate(chains.keys(12))]


def truth(pages: list[Page]) -> dict[bytes, bytes]:
    return {page.key: bytes(page.value) for page in pages}


def test_archive_and_restore_in_packs(bucket: Bucket, pages: list[Page]) -> None:
    manifests = list(bucket.tier.archive(pages))
    assert len(manifests) == 3
    assert sum(m.values for m in manifests) == 12
    bucket.now_s += 50
    assert bucket.restored() == truth(pages)
    page = next(bucket.tier.restore(manifests[0]))
    assert (page.page_index, page.tenant, page.age_s) == (0, TENANT, pytest.approx(60.0))
    some = [p.key for p in bucket.tier.restore(manifests[0], keys={pages[2].key})]
    assert some == [pages[2].key]


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_real_file_systems(kind: str, tmp_path: Path, pages: list[Page]) -> None:
    url = str(tmp_path / "cold") if kind == "local" else f"memory://{tmp_path.name}"
    first = ColdTier(Objects(ColdConfig(url=url)))
    assert len(list(first.archive(pages))) == 1
    second = ColdTier(Objects(ColdConfig(url=url)))
    assert {p.key: bytes(p.value) for m in second.manifests() for p in second.restore(m)} == truth(pages)
    assert second.collect() == 0


def test_a_crash_between_data_and_manifest(bucket: Bucket, pages: list[Page]) -> None:
    bucket.faults.fail_manifest = True
    with pytest.raises(ColdUnavailable):
        list(bucket.tier.archive(pages))
    assert len(bucket.names("packs")) == 1
    bucket.faults.fail_manifest = False
    time.sleep(0.06)
    assert bucket.tier.manifests() == []
    assert bucket.tier.collect() == 0, "it may be an upload that goes on"
    bucket.now_s += bucket.config.grace_s + 60
    assert bucket.tier.collect() == 1
    assert not bucket.names("packs")


def test_the_same_pages_again_make_the_same_pack(bucket: Bucket, pages: list[Page]) -> None:
    list(bucket.tier.archive(pages))
    list(bucket.tier.archive(pages))
    assert len(bucket.names("packs")) == 3


def test_short_ranges_and_flipped_bits_are_lost_pages(bucket: Bucket, pages: list[Page]) -> None:
    list(bucket.tier.archive(pages))
    bucket.faults.flip = True
    got = bucket.restored()
    assert got.items() <= truth(pages).items()
    assert 0 < len(got) < 12
    assert bucket.tier.counters["damaged"] == 12 - len(got)
    bucket.faults.flip = False
    bucket.faults.cut_bytes = 5
    assert bucket.restored() == {}
    assert bucket.tier.counters["bad_packs"] == 3


def test_a_truncated_pack_is_refused_by_its_size(bucket: Bucket, pages: list[Page]) -> None:
    list(bucket.tier.archive(pages))
    for path in bucket.names("packs"):
        MemoryFileSystem.pipe_file(bucket.faults, path, bucket.faults.store[path].getvalue()[:-1])
    assert bucket.restored() == {}


def test_single_failures_are_retried(bucket: Bucket, pages: list[Page]) -> None:
    list(bucket.tier.archive(pages[:1]))
    bucket.faults.fail_next = 2
    assert len(bucket.restored()) == 1


def test_a_storm_of_503_opens_the_breaker(bucket: Bucket, pages: list[Page]) -> None:
    list(bucket.tier.archive(pages))
    bucket.faults.down = True
    for _ in range(4):
        with pytest.raises(ColdUnavailable):
            bucket.tier.manifests()
    calls = bucket.faults.calls
    for _ in range(20):
        with pytest.raises(ColdUnavailable, match="left alone"):
            bucket.tier.manifests()
    assert bucket.faults.calls == calls
    bucket.faults.down = False
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            assert bucket.restored() == truth(pages)
            return
        except ColdUnavailable:
            time.sleep(0.02)
    pytest.fail("it did not heal")


def test_a_call_that_hangs_ends_at_its_deadline(pages: list[Page]) -> None:
    bucket = Bucket(call_timeout_s=0.1, max_calls=2, breaker_open_s=0.001, breaker_max_open_s=0.001)
    bucket.faults.hang.clear()
    started = time.monotonic()
    for _ in range(4):
        with pytest.raises(ColdUnavailable, match=r"no answer|hang|alone"):
            bucket.tier.manifests()
    assert time.monotonic() - started < 2
    assert sum(thread.name == "cedar-cold" for thread in threading.enumerate()) <= 2
    bucket.faults.hang.set()
    time.sleep(0.05)
    assert bucket.tier.manifests() == []


def test_stale_lists(bucket: Bucket, pages: list[Page]) -> None:
    bucket.faults.frozen_list = []
    list(bucket.tier.archive(pages))
    assert bucket.tier.manifests() == [], "not listed yet: not there yet"
    bucket.now_s += bucket.config.grace_s * 2
    bucket.faults.frozen_list = None
    whole = bucket.faults.ls("/bucket/cold/packs")
    bucket.faults.frozen_list = whole  # also what ls("manifests") answers: no manifest is listed
    assert bucket.tier.collect() == 0, "a manifest that a list forgot still protects its pack"
    bucket.faults.frozen_list = None
    old_list = bucket.faults.ls("/bucket/cold/manifests")
    assert bucket.tier.purge(TENANT) == 3
    bucket.faults.frozen_list = old_list
    assert bucket.restored() == {}, "listed, but gone"


def test_expiry_and_purge(bucket: Bucket, pages: list[Page], chains) -> None:
    other = [Page(k, chains.value(k), tenant=b"u" * 32) for k in chains.keys(2, tenant="b")]
    list(bucket.tier.archive([*pages, *other]))
    assert bucket.tier.purge(TENANT) == 3
    assert bucket.restored() == truth(other)
    bucket.now_s += bucket.config.ttl_s + 1
    assert bucket.tier.manifests() == []
    assert bucket.tier.collect() == 1
    assert not bucket.names("packs")
    assert not bucket.names("manifests")


def test_damaged_manifests_are_passed_over(bucket: Bucket, pages: list[Page]) -> None:
    (manifest, *_) = bucket.tier.archive(pages)
    path = f"/bucket/cold/{manifest_name(manifest.pack)}"
    good = bucket.faults.store[path].getvalue()
    for bad in (b"", b"{}", b"[1]", good[:-9], good.replace(b'"values":5', b'"values":6')):
        MemoryFileSystem.pipe_file(bucket.faults, path, bad)
        assert len(bucket.tier.manifests()) == 2
    with pytest.raises(ValueError, match="another"):
        Manifest.from_bytes(good, manifest_name("0" * 32))
    assert pack_name("0" * 32) == f"packs/{'0' * 32}.pack"


def _read_in_child(config: ColdConfig, objects: Objects, queue: Any) -> None:
    tier = ColdTier(objects)
    queue.put((os.getpid(), [m.values for m in tier.manifests()]))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_opens_its_own(tmp_path: Path, pages: list[Page]) -> None:
    config = ColdConfig(url=str(tmp_path / "cold"))
    objects = Objects(config)
    list(ColdTier(objects).archive(pages))
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_read_in_child, args=(config, objects, queue))
    child.start()
    pid, values = queue.get(timeout=20)
    child.join(10)
    assert pid != os.getpid()
    assert values == [12]


def test_an_unknown_url_is_the_callers_fault() -> None:
    with pytest.raises(InvalidRequest, match="url"):
        Objects(ColdConfig(url="no-such-scheme://x")).list("packs")
    with pytest.raises(InvalidRequest, match="pack_bytes"):
        ColdConfig(url="x", pack_bytes=0)
