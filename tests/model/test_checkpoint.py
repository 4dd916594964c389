"""Reading checkpoints: only what a stage needs, by byte ranges, and every lie found in time."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from cedar.model import load_network
from cedar.model.checkpoint import Checkpoint
from cedar.model.errors import CheckpointError, InputError
from cedar.model.fingerprint import fingerprint
from cedar.model.network import Network
from cedar.model.schedule import page_layout
from cedar.model.shards import read_header
from cedar.model.storage import Storage
from cedar.model.tensors import stage_tensors
from cedar.model.weights import load_tensors
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file, save_file

SHARD = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"
CPU = torch.device("cpu")


@pytest.fixture
def copy(golden: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    for name in ("config.json", "tokenizer.json", SHARD, INDEX):
        shutil.copy(golden / name, tmp_path / name)
    return tmp_path


def rewrite(copy: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace tensors of the shard, or drop those that are None; the index follows."""
    tensors = load_file(copy / SHARD)
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, copy / SHARD, metadata={"format": "pt"})
    (copy / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, SHARD)}))


class Meter:
    """Ranges that a MemoryFileSystem was asked for."""

    def __init__(self) -> None:
        self.ranges: list[tuple[str, int, int]] = []

    def bytes_of(self, name: str) -> int:
        return sum(end - begin for path, begin, end in self.ranges if path.endswith(name))


@pytest.fixture
def remote(golden: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Meter]]:
    """The golden checkpoint, in two shards, behind memory://, with every read counted."""
    fs = fsspec.filesystem("memory")
    fs.rm("/bucket", recursive=True) if fs.exists("/bucket") else None
    tensors = load_file(golden / SHARD)
    vision = {k: v for k, v in tensors.items() if k.startswith(("vision.", "aligner.", "image_"))}
    text = {k: v for k, v in tensors.items() if k not in vision}
    shards = {"model-00001-of-00002.safetensors": text, "model-00002-of-00002.safetensors": vision}
    from safetensors.torch import save

    for name, part in shards.items():
        fs.pipe(f"/bucket/tiny/{name}", save(part))
    weight_map = {tensor: name for name, part in shards.items() for tensor in part}
    fs.pipe(f"/bucket/tiny/{INDEX}", json.dumps({"weight_map": weight_map}).encode())
    for name in ("config.json", "tokenizer.json"):
        fs.pipe(f"/bucket/tiny/{name}", (golden / name).read_bytes())
    meter = Meter()
    read = MemoryFileSystem.cat_file

    def counted(
        self: Any, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        data: bytes = read(self, path, start=start, end=end, **kwargs)
        meter.ranges.append((path, start or 0, (start or 0) + len(data)))
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    yield "memory://bucket/tiny", meter
    fs.rm("/bucket", recursive=True)


@pytest.mark.parametrize(
    ("stage", "needs_text", "needs_vision"),
    [("encoder", False, True), ("prefill", True, False), ("decode", True, False), (None, True, True)],
)
def test_a_stage_reads_only_its_tensors(
    remote: tuple[str, Meter], stage: str | None, needs_text: bool, needs_vision: bool
) -> None:
    url, meter = remote
    checkpoint = Checkpoint.open(url)
    specs = stage_tensors(checkpoint.config, stage)
    load_tensors(checkpoint, specs.values(), CPU)
    assert sorted(checkpoint.read_names) == sorted(specs)
    assert not any(name.startswith("mtp.") for name in specs)
    for shard, needed in (("00001-of-00002", needs_text), ("00002-of-00002", needs_vision)):
        name = f"model-{shard}.safetensors"
        if not needed:
            assert meter.bytes_of(name) == 0
            continue
        header = read_header(Storage(url), name)
        wanted = sum(t.end - t.begin for t in header.tensors if t.name in specs)
        headers = 2 * (8 + len(header.raw))  # this test read it once more
        assert meter.bytes_of(name) == wanted + headers


def test_a_remote_checkpoint_is_the_local_one(
    remote: tuple[str, Meter], network: Network, expected: dict[str, torch.Tensor]
) -> None:
    loaded = load_network(remote[0])
    ids = expected["text/input_ids"]
    assert torch.equal(loaded.logits(ids), network.logits(ids))
    assert loaded.fingerprint != network.fingerprint  # other shards: another revision


def test_a_single_file_needs_no_index(golden: Path, tmp_path: Path, network: Network) -> None:
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(golden / name, tmp_path / name)
    shutil.copy(golden / SHARD, tmp_path / "model.safetensors")
    loaded = load_network(tmp_path)
    assert torch.equal(loaded.logits([0, 5, 9]), network.logits([0, 5, 9]))


@pytest.mark.parametrize("stage", ["encoder", "prefill", "decode"])
def test_every_stage_has_the_same_fingerprint(golden: Path, network: Network, stage: str) -> None:
    part = load_network(golden, stage=stage)
    assert part.fingerprint == network.fingerprint
    assert len(part.fingerprint) == 32
    assert (part.text is None, part.vision is None) == (stage == "encoder", stage != "encoder")


def test_the_fingerprint_follows_weights_config_tokenizer_and_format(copy: Path) -> None:
    def now(page_tokens: int | None = None) -> bytes:
        checkpoint = Checkpoint.open(str(copy))
        return fingerprint(checkpoint, page_layout(checkpoint.config, page_tokens))

    seen = {now(), now(64)}
    norm = load_file(copy / SHARD)["layers.7.ffn_norm.weight"]
    norm[3] += 1
    rewrite(copy, {"layers.7.ffn_norm.weight": norm})
    seen.add(now())
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["routed_scaling_factor"] = 2.0
    (copy / "config.json").write_text(json.dumps(config))
    seen.add(now())
    (copy / "config.json").write_text(json.dumps(config, indent=3))
    assert now() in seen  # spaces change nothing
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text() + " ")
    seen.add(now())
    assert len(seen) == 5


def test_large_shards_are_sampled(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cedar.model.fingerprint._WHOLE_BYTES", 0)
    checkpoint = Checkpoint.open(str(copy))
    layout = page_layout(checkpoint.config)
    first = fingerprint(checkpoint, layout)
    blocks = checkpoint.storage.bytes_read
    assert blocks < (copy / SHARD).stat().st_size
    norm = load_file(copy / SHARD)["norm.weight"]
    rewrite(copy, {"norm.weight": norm * 2})
    assert fingerprint(Checkpoint.open(str(copy)), layout) != first


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers.3.attn.wkv.scale": None}, ["layers.3.attn.wkv.scale", "missing", "F8_E8M0 [2, 4]"]),
        ({"norm.weight": torch.zeros(64, dtype=torch.bfloat16)}, ["norm.weight shape", "[64]", "[128]"]),
        ({"norm.weight": torch.zeros(128)}, ["norm.weight dtype", "F32", "BF16"]),
        ({"vision.norm.weight": None}, ["vision.norm.weight", "missing"]),
        (
            {"layers.0.ffn.experts.5.w2.weight": None},
            ["layers.0.ffn.experts.5.w2.weight", "missing", "I8 [128, 32]"],
        ),
    ],
)
def test_a_tensor_that_is_not_as_the_config_says_is_named(
    copy: Path, change: dict[str, torch.Tensor | None], words: list[str]
) -> None:
    rewrite(copy, change)
    with pytest.raises(CheckpointError) as caught:
        load_network(copy)
    assert all(word in str(caught.value) for word in words), caught.value


def test_what_a_stage_does_not_need_may_be_missing(copy: Path) -> None:
    rewrite(copy, {"vision.norm.weight": None, "mtp.0.main_norm.weight": None})
    load_network(copy, stage="prefill")
    with pytest.raises(CheckpointError, match=r"vision\.norm\.weight"):
        load_network(copy, stage="encoder")


@pytest.mark.parametrize("cut", [1, 1000, 5_000_000, 5_433_190])
def test_a_truncated_shard_is_refused(copy: Path, cut: int) -> None:
    data = (copy / SHARD).read_bytes()
    (copy / SHARD).write_bytes(data[: len(data) - cut])
    with pytest.raises(CheckpointError, match=SHARD):
        load_network(copy)


def lie(copy: Path, change: Any) -> None:
    """Rewrite the shard's header, its data left as it is."""
    data = (copy / SHARD).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    raw = json.dumps(header).encode()
    (copy / SHARD).write_bytes(struct.pack("<Q", len(raw)) + raw + data[8 + length :])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h["norm.weight"]["data_offsets"].__setitem__(1, 10**12), "data_offsets"),
        (lambda h: h["norm.weight"].update(shape=[129]), "data_offsets"),
        (lambda h: h["norm.weight"].update(shape=[-128]), "integers of at least 0"),
        (lambda h: h["norm.weight"].update(shape=[128, True]), "integers"),
        (lambda h: h["norm.weight"].update(data_offsets=[0]), "two data_offsets"),
        (lambda h: h["norm.weight"].update(dtype="F4"), "dtype"),
        (lambda h: h.update(extra={"dtype": "BF16", "shape": [128], "data_offsets": [0, 256]}), "overlaps"),
        (lambda h: h.pop("norm.weight"), "hole"),
        (lambda h: h.update(norm="x"), "an object"),
    ],
)
def test_a_lying_header_is_refused(copy: Path, change: Any, words: str) -> None:
    lie(copy, change)
    with pytest.raises(CheckpointError, match=words):
        load_network(copy)


def test_bytes_after_the_last_tensor_are_refused(copy: Path) -> None:
    with (copy / SHARD).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(CheckpointError, match="after the last tensor"):
        load_network(copy)


@pytest.mark.parametrize("length", [0, 2**40, 2**63])
def test_a_header_length_beyond_the_file_is_refused(copy: Path, length: int) -> None:
    data = (copy / SHARD).read_bytes()
    (copy / SHARD).write_bytes(struct.pack("<Q", length) + data[8:])
    with pytest.raises(CheckpointError, match=SHARD):
        load_network(copy)


def test_a_name_given_twice_is_refused(copy: Path) -> None:
    entry = b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    raw = b"{" + entry + b"," + entry + b"}"
    (copy / SHARD).write_bytes(struct.pack("<Q", len(raw)) + raw)
    with pytest.raises(CheckpointError, match="given twice: a"):
        load_network(copy)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "a/b", "..", "", 3, "C:\\x"])
def test_the_index_names_plain_files_only(copy: Path, shard: object) -> None:
    (copy / INDEX).write_text(json.dumps({"weight_map": {"norm.weight": shard}}))
    with pytest.raises(CheckpointError, match="plain name"):
        load_network(copy)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_a_damaged_index_is_refused(copy: Path, text: str) -> None:
    (copy / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX):
        load_network(copy)


def test_an_index_that_names_a_missing_file_is_refused(copy: Path) -> None:
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"]["norm.weight"] = "model-00009.safetensors"
    (copy / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00009\.safetensors"):
        load_network(copy)


def test_an_index_that_names_the_wrong_file_is_refused(copy: Path) -> None:
    save_file({"other": torch.zeros(1)}, copy / "other.safetensors")
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"]["norm.weight"] = "other.safetensors"
    (copy / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"norm\.weight.*missing.*other\.safetensors"):
        load_network(copy)


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path, copy: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_network(tmp_path / "nowhere")
    (copy / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_network(copy)


def test_a_missing_tokenizer_is_named(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_network(copy, stage="decode")


def test_an_unknown_stage_is_refused(golden: Path) -> None:
    with pytest.raises(InputError, match=r"stage='draft'.*encoder"):
        load_network(golden, stage="draft")


def test_engram_tables_that_contradict_the_primes_are_refused(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["engram_vocab_size"] = 67
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="engram_num_embeddings"):
        load_network(copy)
