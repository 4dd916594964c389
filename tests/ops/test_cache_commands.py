"""``cedar cache`` against real store nodes, in processes of their own, as an operator runs it."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cedar.cluster import state_file
from cedar.cluster.state_file import ClusterState, WorkerEntry
from cedar.kvstore.client import StoreClient
from cedar.kvstore.connect import connect
from cedar.kvstore.header import seal_value
from cedar.kvstore.keys import chain_keys, root_key, tenant_domain
from cedar.ops import cli
from cedar.ops.commands.cache_nodes import Target, add_target

FINGERPRINT = hashlib.sha256(b"a model").digest()
SECRET = b"s" * 32
PAGE_TOKENS = 32


class Node:
    """A node in a process of its own."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.directory = directory
        command = [sys.executable, "-m", "cedar.kvstore.node", "--directory", str(directory)]
        command += ["--capacity-gib", "0.25", "--reserve-mib", "1", "--window-mib", "8", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.address = json.loads(self.process.stdout.readline())["address"]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    (tmp_path / "tenant-secret").write_bytes(SECRET)
    node = Node(tmp_path / "node-0")
    yield node
    node.stop()


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "other" / "node-0")
    yield node
    node.stop()


def keys_of(tenant: str, pages: int = 6) -> list[bytes]:
    root = root_key(b"form", FINGERPRINT, tenant_domain(SECRET, tenant))
    return chain_keys(root, list(range(pages * PAGE_TOKENS)), [], PAGE_TOKENS)


def value_of(key: bytes) -> bytes:
    return seal_value(
        hashlib.shake_128(key).digest(3392), fingerprint=FINGERPRINT, page_key=key, tokens=PAGE_TOKENS
    )


def fill(node: Node, *tenants: str) -> None:
    async def put() -> None:
        client = StoreClient(node.address)
        for tenant in tenants:
            keys = keys_of(tenant)
            domain = tenant_domain(SECRET, tenant)
            counts = await client.put_pages(keys, [value_of(key) for key in keys], tenant=domain)
            assert counts.stored == len(keys)
            await client.put_window(keys[-1], 200, b"d" * 32, b"state" * 100)
        await client.close()

    asyncio.run(put())


def held(node: Node, tenant: str) -> int:
    async def match() -> int:
        client = StoreClient(node.address)
        root = root_key(b"form", FINGERPRINT, tenant_domain(SECRET, tenant))
        found = await client.match(root, keys_of(tenant))
        await client.close()
        return found.pages

    return asyncio.run(match())


@pytest.fixture
def cedar(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command; (exit code, stdout)."""

    def run(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        code = cli.main(["cache", *arguments])
        return code, capsys.readouterr().out

    return run


def damage(node: Node, key: bytes) -> None:
    """Flip a byte of a page in the node's file."""
    for path in node.directory.glob("segments/*/values.dat"):
        content = path.read_bytes()
        at = content.find(value_of(key))
        if at >= 0:
            with open(path, "r+b") as file:
                file.seek(at + 1000)
                file.write(bytes([content[at + 1000] ^ 1]))
            return
    raise AssertionError("the page is not there")


def test_stats_and_top(node: Node, cedar: Any) -> None:
    fill(node, "acme", "zeta")
    assert held(node, "acme") == 6
    code, out = cedar("stats", "--node", node.address)
    assert code == 0
    assert "pages held" in out
    code, out = cedar("stats", "--node", node.address, "--json")
    record = json.loads(out)
    assert record["nodes"][node.address]["store_pages"] == 12
    assert record["prompts"] == {}
    code, out = cedar("top", "--node", node.address, "--json")
    tenants = {t["tenant"]: t for t in json.loads(out)["tenants"]}
    acme = tenants[tenant_domain(SECRET, "acme").hex()]
    assert (acme["pages"], acme["used_lately"]) == (6, 6)
    assert acme["bytes"] == 6 * len(value_of(keys_of("acme")[0]))
    code, out = cedar("top", "--node", node.address)
    assert tenant_domain(SECRET, "zeta").hex()[:12] in out


def test_verify_finds_and_scrub_quarantines(node: Node, cedar: Any) -> None:
    fill(node, "acme")
    assert cedar("verify", "--node", node.address)[0] == 0
    bad = keys_of("acme")[2]
    damage(node, bad)
    for _ in range(2):  # verify changes nothing
        code, out = cedar("verify", "--node", node.address, "--json")
        record = json.loads(out)
        assert code == 1
        assert [(p["page_key"], p["reason"]) for p in record["bad"]] == [(bad.hex(), "checksum")]
        assert record["pages"] == 6
    assert cedar("verify", "--node", node.address, "--tenant", "zeta", "--secret-file",
                 str(node.directory.parent / "tenant-secret"))[0] == 0  # fmt: skip
    code, out = cedar("scrub", "--node", node.address, "--rate-mib", "100")
    assert code == 0
    assert "1 damaged, now quarantined" in out
    assert list(node.directory.glob("quarantine/*"))
    code, out = cedar("verify", "--node", node.address, "--json")
    assert (code, json.loads(out)["pages"]) == (0, 5)
    assert held(node, "acme") == 2


def test_export_and_import_carry_a_tenant(node: Node, second: Node, tmp_path: Path, cedar: Any) -> None:
    fill(node, "acme", "zeta")
    file = tmp_path / "acme.pack"
    code, out = cedar("export", str(file), "--node", node.address, "--tenant", "acme", "--json")
    assert code == 0
    assert json.loads(out)["pages"] == 6
    assert cedar("export", str(file), "--node", node.address)[0] == 2, "an existing file is not replaced"
    code, out = cedar("import", str(file), "--node", second.address, "--json")
    assert (code, json.loads(out)["stored"]) == (0, 6)
    assert (held(second, "acme"), held(second, "zeta")) == (6, 0)
    code, out = cedar("import", str(file), "--node", second.address)
    assert code == 0
    assert "6 present" in out
    content = bytearray(file.read_bytes())
    content[2000] ^= 1
    file.write_bytes(content)
    code, out = cedar("import", str(file), "--node", second.address, "--json")
    assert (code, json.loads(out)["damaged"]) == (1, 1)
    file.write_bytes(content[:-5])
    assert cedar("import", str(file), "--node", second.address)[0] == 2


def test_cold_tier_there_and_back(node: Node, second: Node, tmp_path: Path, cedar: Any) -> None:
    fill(node, "acme", "zeta")
    url = str(tmp_path / "cold")
    code, out = cedar("export", "--cold", url, "--node", node.address, "--json")
    record = json.loads(out)
    assert (code, record["pages"], len(record["packs"])) == (0, 12, 2)
    zeta = tenant_domain(SECRET, "zeta").hex()
    code, out = cedar("warm", "--cold", url, "--node", second.address, "--tenant-domain", zeta, "--json")
    assert (code, json.loads(out)["stored"]) == (0, 6)
    assert (held(second, "acme"), held(second, "zeta")) == (0, 6)
    assert cedar("warm", "--cold", url, "--node", second.address)[0] == 0
    assert held(second, "acme") == 6
    code, out = cedar(
        "purge", "--tenant-domain", zeta, "--node", second.address, "--cold", url, "--yes", "--json"
    )
    record = json.loads(out)
    assert (code, record["pages"], record["cold_packs"]) == (0, 6, 1)
    assert (held(second, "acme"), held(second, "zeta")) == (6, 0)


class Service(Node):
    """A membership service in a process of its own."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "cedar.kvstore.membership_service", "--lease-s", "1.0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.address = json.loads(self.process.stdout.readline())["address"]


def test_drain_hands_over(node: Node, tmp_path: Path, cedar: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cedar("drain", node.address, "--node", node.address)[0] != 0, "nobody would take over"
    service = Service()
    names = ("a", "b")
    nodes = [Node(tmp_path / n, "--membership", service.address, "--node-id", n) for n in names]
    both = [part for each in nodes for part in ("--node", each.address)]
    keys = keys_of("acme", 64)

    async def with_store(put: bool) -> int:
        store = connect(f"membership://{service.address}")
        give_up_s = time.monotonic() + 60
        while put:  # until the nodes are listed, everything is refused
            counts = await store.put_pages(keys, [value_of(key) for key in keys], tenant=b"t" * 32)
            if counts.stored + counts.present == len(keys):
                break
            assert time.monotonic() < give_up_s, counts
            await asyncio.sleep(0.1)
        pages = (await store.match(root_key(b"form", FINGERPRINT, tenant_domain(SECRET, "acme")), keys)).pages
        await store.close()
        return pages

    try:
        assert asyncio.run(with_store(True)) == 64
        assert cedar("drain", "nobody", *both)[0] == 2
        code = cli.main(["cache", "drain", "b", *both, "--timeout", "30"])
        told = capsys.readouterr()
        assert code == 0, told
        assert f"b at {nodes[1].address}: the others hold what it held" in told.out
        assert "runs are waited for" in told.err
        nodes[1].process.kill()
        assert asyncio.run(with_store(False)) == 64
        code, _ = cedar("drain", nodes[0].address, "--node", nodes[0].address, "--json")
        assert code != 0, "the last one"
    finally:
        for each in (*nodes, service):
            each.stop()


def test_certificates_come_from_the_cluster_s_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cedar.cluster.config_load import load_config
    from cedar.cluster.config_print import effective_yaml

    monkeypatch.setenv("CEDAR_STATE_DIR", str(tmp_path / "state"))
    files = {f"{name}_file": str(tmp_path / f"{name}.pem") for name in ("ca", "certificate", "key")}
    config = load_config("local-cpu", [f"store.tls.{name}={path}" for name, path in files.items()])
    entries = (WorkerEntry("store", "127.0.0.1:7", 1, 1),)
    state_file.write(ClusterState("default", "127.0.0.1:1", 1, 0, 0.0, "", effective_yaml(config), entries))

    def found(*arguments: str) -> Any:
        parser = argparse.ArgumentParser()
        add_target(parser)
        return Target.find(parser.parse_args(arguments)).tls

    tls = found()
    assert tls is not None
    assert {name: str(getattr(tls, name)) for name in files} == files
    other = found("--tls", "a", "b", "c")
    assert str(other.certificate_file) == "b", "what is said on the command line wins"
    assert found("--node", "127.0.0.1:7") is None


def test_purge_needs_a_yes_and_removes_windows(node: Node, cedar: Any) -> None:
    fill(node, "acme", "zeta")
    domain = tenant_domain(SECRET, "acme").hex()
    assert cedar("purge", "--tenant-domain", domain, "--node", node.address)[0] == 2
    assert held(node, "acme") == 6
    code, out = cedar("purge", "--tenant-domain", domain, "--node", node.address, "--yes", "--json")
    assert code == 0
    assert json.loads(out)["pages"] == 6
    assert (held(node, "acme"), held(node, "zeta")) == (0, 6)


def test_callers_mistakes(node: Node, tmp_path: Path, cedar: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CEDAR_STATE_DIR", str(tmp_path / "none"))
    assert cedar("stats")[0] == 3
    assert cedar("export", "--node", node.address)[0] == 2
    assert cedar("export", str(tmp_path / "x"), "--node", node.address)[0] == 1, "nothing is held"
    assert not (tmp_path / "x").exists()
    assert cedar("verify", "--sample", "3", "--node", node.address)[0] == 2
    assert cedar("purge", "--tenant-domain", "ab", "--node", node.address, "--yes")[0] == 2
    assert cedar("explain", "hello", "--node", node.address)[0] == 2
    assert cedar("warm", "--node", node.address)[0] == 2
    assert cedar("stats", "--node", "127.0.0.1:1")[0] == 3


@pytest.fixture
def cluster(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The state file of a cluster whose store is the node, and the tools of its model."""
    from cedar.actors.prompts import PromptTools
    from cedar.cluster.config_load import load_config
    from cedar.cluster.config_print import effective_yaml

    monkeypatch.setenv("CEDAR_STATE_DIR", str(tmp_path / "state"))
    config = load_config("local-cpu", ["model.page_tokens=32"])
    entries = (WorkerEntry("store", node.address, node.process.pid, 1),)
    state = ClusterState("default", "127.0.0.1:1", 1, 0, 0.0, "", effective_yaml(config), entries)
    state_file.write(state)
    return PromptTools.load(config.model.path, config.model.page_tokens)


def test_explain_page_by_page(node: Node, cluster: Any, cedar: Any) -> None:
    from cedar.v1 import generation_pb2

    text = "word " * (6 * cluster.page_tokens)
    ids = cluster.prepare(generation_pb2.GenerateRequest(text=text)).ids
    domain = tenant_domain(SECRET, "default")
    root = root_key(cluster.format_id, cluster.fingerprint, domain)
    keys = chain_keys(root, ids, [], cluster.page_tokens)
    assert len(keys) >= 5

    def put(first: int, some: list[bytes]) -> None:
        async def go() -> None:
            client = StoreClient(node.address)
            await client.put_pages(some, [value_of(k) for k in some], first_page=first, tenant=domain)
            await client.close()

        asyncio.run(go())

    code, out = cedar("explain", text, "--raw", "--json")
    assert code == 0
    record = json.loads(out)
    assert record["prompt_tokens"] == len(ids)
    assert record["hit_pages"] == record["cached_tokens"] == 0
    put(0, keys[:2])
    put(3, keys[3:4])
    record = json.loads(cedar("explain", text, "--raw", "--json")[1])
    outcomes = [page["outcome"].split(":")[0] for page in record["pages"]]
    assert outcomes[:5] == ["hit", "hit", "miss", "unreachable", "miss"]
    assert record["cached_tokens"] == 2 * cluster.page_tokens
    assert record["pages"][0]["nodes"] == [node.address]
    assert record["pages"][0]["tenant"] == domain.hex()
    other = json.loads(cedar("explain", text, "--raw", "--json", "--tenant", "zeta")[1])
    assert other["hit_pages"] == 0
    code, out = cedar("explain", text, "--raw")
    assert code == 0
    assert "2 of" in out
    assert "page 2 ends it: not held" in out
    code, _ = cedar("export", str(node.directory / "p.pack"), "--prompt", text, "--raw")
    assert code == 0


def test_explain_a_prompt_below_a_page(cluster: Any, cedar: Any) -> None:
    code, out = cedar("explain", "word", "--raw")
    assert code == 0
    page = cluster.page_tokens
    assert re.fullmatch(rf"this prompt of \d+ tokens is shorter than a page of {page}, so it has none\n", out)
    assert json.loads(cedar("explain", "word", "--raw", "--json")[1])["pages"] == []


@pytest.mark.usefixtures("cluster")
def test_stats_name_sources_as_the_metrics_do(cedar: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cedar.kvstore.metrics import PromptMetrics
    from cedar.ops.commands import cache_view
    from cedar.v1.common_pb2 import PromptSources

    counts = {"hit_local_tokens": 1, "hit_store_tokens": 2, "state_tokens": 3, "computed_tokens": 4}
    metrics = PromptMetrics(page_tokens=32)
    metrics.admitted("t", PromptSources(prompt_tokens=10, **counts))
    found = re.findall(r'cedar_prompt_tokens_total{source="(\w+)",tenant="t"} (\d+)', metrics.exposition())
    shown = {"prompt_tokens": 10.0, **counts, "replayed_tokens": 5.0}
    monkeypatch.setattr(cache_view, "prompt_sources", lambda target: shown)
    (words,) = re.findall(r"came from a cache \((.*)\)", cedar("stats")[1])
    assert sorted(words.split(", ")) == sorted(f"{number} {name}" for name, number in found)
    assert len(found) == 4
