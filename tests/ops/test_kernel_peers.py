"""The kernel benchmark's peers: a missing one is named; inputs and checks are right without a card."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from cedar.kernels import fp4_ref, select_ref
from cedar.ops.bench import kernel_cases_deep_gemm as deep_gemm
from cedar.ops.bench import kernel_cases_deep_gemm_linear as deep_gemm_linear
from cedar.ops.bench import kernel_cases_flash_mla as flash_mla
from cedar.ops.bench import kernel_cases_flashinfer as flashinfer
from cedar.ops.bench import kernel_peers, kernels


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that peers are looked for in, and nothing of it left behind."""
    monkeypatch.setenv(kernel_peers.FOLDERS, str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for peer in kernel_peers.PEERS.values():
        monkeypatch.delitem(sys.modules, peer.module, raising=False)
    return tmp_path


def test_a_missing_peer_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("with a card the peers are measured")
    (folder / "flash_mla.py").write_text("import no_such_module_of_its")
    (folder / "flashinfer.py").write_text("raise OSError('libnothing.so: not found')")
    assert kernels.main(["--peers"]) == 0
    out = capsys.readouterr().out
    assert "FlashMLA needs the module no_such_module_of_its, which is not installed" in out
    assert "flashinfer does not load: OSError: libnothing.so: not found" in out
    assert f"DeepGEMM is not installed; searched {folder} too" in out
    assert "SGLang's TileLang kernel is not installed" in out


def test_a_peer_in_a_folder_is_found_and_one_for_another_card_is_refused(folder: Path) -> None:
    (folder / "deep_gemm.py").write_text("here = 1")
    assert kernel_peers.usable("deep_gemm", 9).here == 1
    with pytest.raises(kernel_peers.PeerMissing, match=r"compute capability 9\.x, this card's is 12\.x"):
        kernel_peers.usable("deep_gemm", 12)
    missing = [row["operation"] for row in kernel_peers.missing_peers()]
    assert missing == ["FlashMLA", "flashinfer", "SGLang's TileLang kernel"]


def test_every_peer_has_cases() -> None:
    for name, peer in kernel_peers.PEERS.items():
        module, function = peer.cases.split(":")
        assert callable(getattr(import_module(module), function)), name


def test_flash_mla_rows() -> None:
    torch.manual_seed(1)
    keys = (torch.randn(192, 512) * torch.rand(192, 1) * 40).to(torch.bfloat16)
    keys[5] = 0
    cache = flash_mla.empty_cache(192, "cpu")
    flash_mla.fill(cache, 0, keys[:64])
    flash_mla.fill(cache, 64, keys[64:])
    assert (cache.shape, cache.stride()) == ((3, 64, 1, 584), (37_440, 584, 584, 1))
    held = flash_mla.read(cache, torch.arange(192))
    assert torch.equal(held[:, 448:], keys[:, 448:])
    step = (
        keys[:, :448].float().view(192, 7, 64).abs().amax(-1, keepdim=True) / 16
    )  # 3 bits below the greatest
    assert ((held - keys)[:, :448].float().view(192, 7, 64).abs() <= step).all()
    flash_mla.fill(cache, 0, held[128:])  # what the format holds comes back as it is
    assert torch.equal(flash_mla.read(cache, torch.arange(64)), held[128:])
    flat = cache.as_strided((37_440,), (1,), 2 * 37_440)  # block 2: 64 rows, then their scales
    assert torch.equal(flat[448:576].view(torch.bfloat16), keys[128, 448:])
    exponent = flat[64 * 576 : 64 * 576 + 7].float() - 127
    scaled = held[128, :448].float() / 2 ** exponent.repeat_interleave(64)
    assert torch.equal(flat[:448].view(torch.float8_e4m3fn).float(), scaled)
    with pytest.raises(ValueError, match=r"first=32 and 64 keys: must be multiples of 64"):
        flash_mla.fill(cache, 32, keys[:64])


def test_flash_mla_inputs_point_at_the_same_keys() -> None:
    torch.manual_seed(2)
    payload, scales = flash_mla.MAIN
    pages = torch.zeros(3, 227_840, dtype=torch.uint8)
    keys = torch.randn(3 * 256, 512).to(torch.bfloat16)
    packed = fp4_ref.pack_e4m3(keys)
    for plane, part in zip((payload, scales), packed, strict=True):
        pages[:, plane.offset : plane.offset + plane.rows * plane.row_bytes] = part.view(3, -1)
    table = torch.tensor([[2, 0], [1, 2]], dtype=torch.int32)
    seq = torch.tensor([1, 0, 1], dtype=torch.int32)
    entries = torch.tensor([[0, 300, -1], [7, 255, 256], [511, -1, 4]], dtype=torch.int32)
    rope = torch.ones(3, 32), torch.zeros(3, 32)
    q = torch.randn(3, 64, 512).to(torch.bfloat16)
    window = torch.zeros(256, 528, dtype=torch.uint8)
    arguments = (q, pages, flash_mla.MAIN, table, seq, entries, window, None, None, rope)
    turned, at, near = flash_mla.inputs(arguments)
    assert torch.equal(turned, q)
    assert at.tolist() == [[256, 556, -1], [519, 767, 0], [767, -1, 260]]
    assert near.shape == (256, 512)
    values = fp4_ref.unpack_e4m3(*packed)
    assert torch.equal(flash_mla.unpacked(pages, 1, 2), values[256:])
    cache = flash_mla.repacked(pages)
    error = (flash_mla.read(cache, torch.arange(768)) - values).float().norm() / values.float().norm()
    assert error < 0.04
    present = at >= 0
    right = flash_mla.truth(q, flash_mla.read(cache, at), present, torch.zeros(64))
    alone = flash_mla.truth(q[:1], flash_mla.read(cache, at[:1, :2]), present[:1, :2], torch.zeros(64))
    torch.testing.assert_close(right[:1], alone)


def test_flashinfer_check_finds_what_is_wrong() -> None:
    torch.manual_seed(3)
    scores = (torch.randn(3, 200) * 4).round()
    values, positions = torch.topk(scores, 16, dim=1)
    assert flashinfer.wrong_choices(scores, values, positions) == 0
    least = scores.argmin(1)
    for column, value in ((3, int(least[1])), (4, int(positions[1, 5])), (0, 200), (0, -1)):
        broken = positions.clone()
        broken[1, column] = value
        assert flashinfer.wrong_choices(scores, values, broken) > 0
    assert flashinfer.wrong_choices(scores, values + 1, positions) > 0
    ours = select_ref.top_k(scores, 16)
    assert flashinfer.wrong_choices(scores, scores.gather(1, ours.long()), ours) == 0


def test_deep_gemm_cache_and_truth() -> None:
    torch.manual_seed(4)
    keys = torch.randn(128, 128) * torch.rand(128, 1)
    coded, scale = deep_gemm.to_fp8(keys)
    assert ((coded.float() * scale[:, None] - keys).norm() / keys.norm()) < 0.04
    cache = deep_gemm.fused(coded, scale)
    assert cache.shape == (2, 64, 1, 132)
    block = cache.view(2, -1)[1]
    assert torch.equal(block[: 64 * 128].view(torch.float8_e4m3fn).float(), coded[64:].float().flatten())
    assert torch.equal(block[64 * 128 :].view(torch.float32), scale[64:])
    q, q_scale = deep_gemm.to_fp8(torch.randn(2, 32, 128))
    weights = torch.randn(2, 32)
    logits = torch.einsum("nhc,kc->nhk", q.double(), coded.double() * scale.double()[:, None])
    right = (logits.relu() * weights.double()[..., None]).sum(1)
    torch.testing.assert_close(deep_gemm.truth(q, weights, coded, scale), right)
    assert q_scale.shape == (2, 32)


def test_deep_gemm_linear_truth() -> None:
    torch.manual_seed(5)
    x, weight = torch.randn(3, 256), torch.randn(128, 256)
    coded, scale = deep_gemm_linear.to_groups(x)
    assert scale.shape == (3, 2)
    held = coded.double().view(3, 2, 128) * scale.double()[..., None]
    assert ((held.flatten(1) - x).norm() / x.norm()) < 0.04
    w, blocks = weight.to(torch.float8_e4m3fn), torch.tensor([[0.5, 2.0]])
    right = held[:, 0] @ w[:, :128].double().T / 2 + held[:, 1] @ w[:, 128:].double().T * 2
    torch.testing.assert_close(deep_gemm_linear.truth(coded, scale, w, blocks), right)
