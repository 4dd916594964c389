"""Every golden layer, computed from the golden streams of the layer before, is met bit for bit."""

from __future__ import annotations

import pytest
import torch
from cedar.kernels.fp4 import unpack_fp4_e4m3, unpack_fp4_e8m0
from cedar.kernels.fp8 import unpack_window_rows
from cedar.kernels.linear import linear_dense
from cedar.kernels.mhc import mhc_collapse
from cedar.kernels.norm import rms_norm

from .tiny_backbone import config, expected, run_layer, weights


def same(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert got.shape == wanted.shape, what
    differing = int((got != wanted).sum())
    assert differing == 0, f"{what}: {differing} of {got.numel()} values differ"


def same_pre(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """The golden run's sigmoid is an ulp away in what is left over after whole vectors of 16: four tokens."""
    whole = len(got) // 4 * 4
    same(got[:whole], wanted[:whole], what)
    torch.testing.assert_close(got[whole:], wanted[whole:], rtol=2**-22, atol=0)


@pytest.mark.parametrize("prompt", ["text", "image"])
def test_every_layer_equals_the_golden_one(prompt: str) -> None:
    golden, c, w = expected(), config(), weights()
    ids = golden[f"{prompt}/input_ids"][0]
    is_image = (
        golden["image/token_types"][0] >= 0 if prompt == "image" else torch.zeros_like(ids, dtype=torch.bool)
    )
    if prompt == "text":
        stream = w["embed.weight"][ids].unsqueeze(1).repeat(1, c["hc_mult"], 1)
        pre = torch.zeros(len(ids), c["hc_mult"])
        pre[:, 0] = 1.0
    memory, selection = None, None
    for layer in range(c["num_hidden_layers"]):
        name = f"{prompt}/layer{layer:02d}."
        if layer or prompt == "text":
            rows = golden.get(name + "engram_hash")
            out = run_layer(
                layer, stream, pre, is_image, rows[0] if rows is not None else None, memory, selection
            )
            memory, selection = out.memory, out.selection
            same(out.attn_out, golden[name + "attn_out"][0], name + "attn_out")
            same(out.ffn_out, golden[name + "ffn_out"][0], name + "ffn_out")
            same(out.stream, golden[name + "stream"][0], name + "stream")
            same_pre(out.pre, golden[name + "pre"][0], name + "pre")
            ring = torch.arange(len(ids))[-c["sliding_window"] :]
            keys = unpack_window_rows(out.window, c["head_dim"])[ring]
            same(keys, golden[name + "window_kv"][0][ring % c["sliding_window"]], name + "window_kv")
            if out.entries is not None:
                main = unpack_fp4_e4m3(out.entries.main_payload, out.entries.main_scales)
                index = unpack_fp4_e8m0(out.entries.index_payload, out.entries.index_scales)
                same(main, golden[name + "global_kv"][0], name + "global_kv")
                same(index, golden[name + "index_k"][0], name + "index_k")
            if layer in c["index_source_layer_ids"]:
                same(selection.entries, golden[name + "topk"][0], name + "topk")
        stream, pre = golden[name + "stream"][0], golden[name + "pre"][0]
    final = rms_norm(mhc_collapse(stream, pre), w["norm.weight"], c["rms_norm_eps"])
    same(final, golden[f"{prompt}/final_normed"][0], "final_normed")
    same(linear_dense(final, w["head.weight"], torch.float32), golden[f"{prompt}/logits"][0], "logits")
