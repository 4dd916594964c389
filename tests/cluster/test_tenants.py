from pathlib import Path

import pytest
from cedar.cluster.config import AuthSettings
from cedar.cluster.errors import ConfigError, Unauthenticated
from cedar.cluster.tenants import Tenants, load_keys, load_secret

SECRET = b"s" * 32


def test_without_keys_everyone_is_the_default_tenant() -> None:
    tenants = Tenants(SECRET, default="house")
    assert tenants.of([("authorization", "Bearer anything")]).name == "house"
    assert tenants.of([]).domain == tenants.of([("x-api-key", "k")]).domain


def test_keys_name_tenants() -> None:
    tenants = Tenants(SECRET, keys={"k1": "a", "k2": "a", "k3": "b"})
    one = tenants.of([("user-agent", "x"), ("authorization", "Bearer k1")])
    assert one.name == "a"
    assert tenants.of([("x-api-key", "k2")]) == one
    assert tenants.of([("authorization", "bearer k3")]).domain != one.domain
    assert len(one.domain) == 32


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("x-api-key", "no")],
        [("authorization", "Basic k1")],
        [("x-tenant", "a")],
        [("x-api-key", b"\xff")],
    ],
)
def test_others_are_not_let_in(metadata: list[tuple[str, str | bytes]]) -> None:
    with pytest.raises(Unauthenticated):
        Tenants(SECRET, keys={"k1": "a"}).of(metadata)


def test_domains_depend_on_the_secret() -> None:
    assert Tenants(SECRET).of([]).domain != Tenants(b"t" * 32).of([]).domain
    with pytest.raises(ConfigError, match=r"gateway\.auth\.secret_file: 3 bytes \(at least 16\)"):
        Tenants(b"abc")


def test_secret_is_made_once_beside_the_store(tmp_path: Path) -> None:
    first = load_secret(AuthSettings(), str(tmp_path / "store"))
    assert load_secret(AuthSettings(), str(tmp_path / "store")) == first
    assert (tmp_path / "store" / "tenant-secret").stat().st_mode & 0o777 == 0o600
    assert load_secret(AuthSettings(), None) != load_secret(AuthSettings(), None)


def test_secret_and_keys_from_files(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x" * 40 + b"\n")
    assert load_secret(AuthSettings(secret_file=str(tmp_path / "secret")), None) == b"x" * 40
    (tmp_path / "keys").write_text("key-1: a\nkey-2: b\n")
    assert load_keys(AuthSettings(api_keys_file=str(tmp_path / "keys"))) == {"key-1": "a", "key-2": "b"}
    assert load_keys(AuthSettings()) is None


@pytest.mark.parametrize("text", ["", "[]", "a: 1", "a: ''", "{"])
def test_a_bad_key_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match=r"gateway\.auth\.api_keys_file"):
        load_keys(AuthSettings(api_keys_file=str(tmp_path / "keys")))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.auth\.secret_file: .*No such file"):
        load_secret(AuthSettings(secret_file=str(tmp_path / "none")), None)
