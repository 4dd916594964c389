"""Window state as bytes: out of one place, into another, and on as if nothing had happened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cedar.model import load_network
from cedar.model.errors import InputError, RecordError
from cedar.model.network import Network
from cedar.model.state import KVMemory, SequenceState
from cedar.model.window_record import export_window, import_window, read_header
from safetensors.torch import load_file, save_file

from .sequences import leftover_memory, run, sequence, snapshot, unchanged

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def ids(expected_ced: Tensors) -> list[int]:
    return expected_ced["long/input_ids"].tolist()


def move(
    network: Network, memory: KVMemory, seq: SequenceState, other: KVMemory, slot: int, first_page: int
) -> SequenceState:
    """The sequence in another memory: its sealed pages copied, everything else by its record."""
    moved = sequence(network, list(seq.ids), slot=slot, first_page=first_page)
    sealed = seq.length // network.layout.page_tokens
    for i in range(sealed):
        other.pages[moved.pages[i]] = memory.pages[seq.pages[i]]
    import_window(network, other, moved, export_window(network, memory, seq))
    return moved


@pytest.mark.parametrize("length", [1, 2, 15, 16, 31, 32, 33, 64, 97])
def test_a_record_continues_in_another_slot_other_pages_and_another_memory(
    network: Network, memory: KVMemory, ids: list[int], length: int
) -> None:
    seq = sequence(network, ids[:130], slot=1, first_page=10)
    run(network, memory, seq, [length])
    other = leftover_memory(network)
    moved = move(network, memory, seq, other, slot=5, first_page=30)
    assert (moved.length, moved.decoder_start) == (seq.length, seq.decoder_start)
    assert export_window(network, other, moved) == export_window(network, memory, seq)
    for _ in range(5):
        assert torch.equal(network.decode(memory, [seq]), network.decode(other, [moved]))
    assert torch.equal(run(network, memory, seq, [120]), run(network, other, moved, [119, 120]))


def test_a_record_of_a_replayed_sequence_keeps_its_window_starts(
    network: Network, memory: KVMemory, ids: list[int]
) -> None:
    donor = sequence(network, ids[:64], slot=0, first_page=0)
    network.prefill(memory, donor, 64)
    seq = sequence(network, ids[:130], slot=1, first_page=10)
    seq.pages[:2] = donor.pages
    seq.length = seq.encoder_start = 48
    seq.write_from = 64
    run(network, memory, seq, [70])
    other = leftover_memory(network)
    moved = move(network, memory, seq, other, slot=2, first_page=20)
    assert (moved.encoder_start, moved.decoder_start) == (48, 54)
    for _ in range(12):
        assert torch.equal(network.decode(memory, [seq]), network.decode(other, [moved]))


def test_a_record_holds_nothing_of_other_sequences(network: Network, ids: list[int]) -> None:
    """The same sequence among zeros and among leftovers gives the same bytes."""
    records = []
    for memory in (
        leftover_memory(network),
        KVMemory.allocate(network.config, network.layout, pages=64, slots=8, device="cpu"),
    ):
        donor = sequence(network, ids[:32], slot=0, first_page=0)
        network.prefill(memory, donor, 32)
        seq = sequence(network, ids[:60], slot=1, first_page=10)
        seq.pages[0] = donor.pages[0]
        seq.length = seq.encoder_start = 16
        seq.write_from = 32
        run(network, memory, seq, [35], decoder_from=33)
        records.append(export_window(network, memory, seq))
    assert records[0] == records[1]


_CHILD = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from cedar.model import load_network
from cedar.model.window_record import import_window

torch.set_num_threads(1)
golden, folder = Path(sys.argv[1]), Path(sys.argv[2])
network = load_network(golden, stage="decode")
given = load_file(folder / "given.safetensors")
memory, seq = network.own_sequence(given["ids"].tolist())
memory.pages[: len(given["pages"])] = given["pages"]
import_window(network, memory, seq, (folder / "record").read_bytes())
logits = torch.cat([network.decode(memory, [seq]) for _ in range(8)])
save_file({"logits": logits}, folder / "got.safetensors")
"""


def test_a_record_continues_in_another_process(
    network: Network, memory: KVMemory, ids: list[int], golden: Path, tmp_path: Path
) -> None:
    seq = sequence(network, ids[:90], slot=1, first_page=10)
    run(network, memory, seq, [75])
    given = {"ids": torch.tensor(seq.ids), "pages": memory.pages[seq.pages[: 75 // 32]].contiguous()}
    save_file(given, tmp_path / "given.safetensors")
    (tmp_path / "record").write_bytes(export_window(network, memory, seq))
    command = [sys.executable, "-c", _CHILD, str(golden), str(tmp_path)]
    subprocess.run(command, check=True, timeout=120)
    wanted = torch.cat([network.decode(memory, [seq]) for _ in range(8)])
    assert torch.equal(load_file(tmp_path / "got.safetensors")["logits"], wanted)


@pytest.fixture
def record(network: Network, memory: KVMemory, ids: list[int]) -> bytes:
    seq = sequence(network, ids[:60], slot=1, first_page=10)
    run(network, memory, seq, [45])
    return export_window(network, memory, seq)


def test_the_header_says_whose_the_record_is(network: Network, record: bytes) -> None:
    header = read_header(record)
    assert (header.length, header.encoder_start, header.decoder_start) == (45, 0, 29)
    assert header.fingerprint == network.fingerprint


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        (lambda r: b"", "length"),
        (lambda r: r[:50], "length"),
        (lambda r: b"X" + r[1:], "magic"),
        (lambda r: r[:8] + b"\x63" + r[9:], "version"),
        (lambda r: r[:12] + bytes([r[12] ^ 1]) + r[13:], "fingerprint"),
        (lambda r: r[:44] + bytes([r[44] ^ 1]) + r[45:], "shape"),
        (lambda r: r[:76] + (46).to_bytes(8, "little") + r[84:], "body"),
        (lambda r: r[:76] + (0).to_bytes(8, "little") + r[84:], "starts and length"),
        (lambda r: r[:84] + (99).to_bytes(8, "little") + r[92:], "starts and length"),
        (lambda r: r[:-1], "body"),
        (lambda r: r + b"\0", "body"),
        (lambda r: r[:500] + bytes([r[500] ^ 4]) + r[501:], "body"),
    ],
)
def test_a_damaged_or_foreign_record_changes_nothing(
    network: Network, memory: KVMemory, ids: list[int], record: bytes, damage: object, field: str
) -> None:
    seq = sequence(network, ids[:60], slot=3, first_page=30)
    before = snapshot(memory)
    with pytest.raises(RecordError, match=field):
        import_window(network, memory, seq, damage(record))  # type: ignore[operator]
    assert seq.length == 0
    assert unchanged(memory, before)


def test_another_page_format_is_foreign(network: Network, golden: Path, record: bytes) -> None:
    other = load_network(golden, page_tokens=64)
    memory, seq = other.own_sequence([5] * 60)
    with pytest.raises(RecordError, match="fingerprint"):
        import_window(other, memory, seq, record)


def test_a_sequence_without_room_is_refused(network: Network, memory: KVMemory, record: bytes) -> None:
    with pytest.raises(InputError, match="number of token ids, 44"):
        import_window(network, memory, SequenceState(slot=0, pages=[0, 1], ids=[5] * 44), record)
    with pytest.raises(InputError, match="pages=1, must be at least 2"):
        import_window(network, memory, SequenceState(slot=0, pages=[0], ids=[5] * 60), record)


def test_there_is_no_record_before_or_inside_a_prefill(
    network: Network, memory: KVMemory, ids: list[int]
) -> None:
    seq = sequence(network, ids[:60])
    with pytest.raises(InputError, match="sequence length=0"):
        export_window(network, memory, seq)
    network.prefill(memory, seq, 20)
    with pytest.raises(InputError, match="finish_prefill comes before a record"):
        export_window(network, memory, seq)
