"""The store's settings: how they reach its nodes, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from cedar.cluster.config_load import load_config, parse_config
from cedar.cluster.errors import ConfigError
from cedar.cluster.worker_configs import peer_config, prefill_config, store_config, store_tls
from cedar.kvstore.keys import tenant_domain

from .in_process import HOST

TLS = {"ca_file": "ca.pem", "certificate_file": "cert.pem", "key_file": "key.pem"}


def test_settings_reach_the_nodes(tmp_path: Path) -> None:
    store: dict[str, Any] = {
        "nodes": 3,
        "copies": 3,
        "copy_after_hits": 0,
        "copy_bytes_per_s": 5,
        "move_bytes_per_s": 6,
        "metrics_port": 9000,
        "durability": "none",
        "tls": TLS,
        "tenants": {"acme": {"ttl_s": 60, "quota_bytes": 1000}},
    }
    config = parse_config({"model": {"path": "/m"}, "store": store})
    node = store_config(config, str(tmp_path), HOST, index=2, secret=b"s" * 32)
    limits = node.ssd.tenants[tenant_domain(b"s" * 32, "acme")]
    assert (limits.ttl_s, limits.quota_bytes) == (60, 1000)
    assert (node.metrics_port, node.ssd.durability) == (9002, "none")
    assert node.tls is not None
    assert node.tls.key_file == Path("key.pem")
    assert prefill_config(config, HOST).store_tls == store_tls(config) == node.tls
    peers = peer_config(config, "membership://h:1")
    assert (peers.membership, peers.copies, peers.copy_after_hits) == ("h:1", 3, 0)
    assert (peers.copy_bytes_per_s, peers.move_bytes_per_s) == (5, 6)
    assert peer_config(config, "").membership == ""


def test_certificates_are_taken_from_the_files_folder(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    names = ", ".join(f"{name}: {path}" for name, path in TLS.items())
    file.write_text(f"model: {{path: m}}\nstore: {{tls: {{{names}}}}}\n")
    tls = load_config(file).store.tls
    assert tls is not None
    assert tls.ca_file == str(tmp_path / "ca.pem")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"store": {"tenants": {"acme": {"ttl": 1}}}}, "store.tenants.acme.ttl: unknown key; did you mean"),
        ({"store": {"tls": {"cafile": "x"}}}, "store.tls.cafile: unknown key; did you mean 'ca_file'"),
        ({"store": {"nodes": 2, "metrics_port": 65535}}, "metrics_port: 65535 leaves no port for 2 nodes"),
        ({"store": {"tenants": {"acme": {}}}, "ray": {"address": "auto"}}, "needs gateway.auth.secret_file"),
    ],
)  # fmt: skip
def test_mistakes_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"model": {"path": "/m"}, **settings})
    assert said in str(caught.value)
