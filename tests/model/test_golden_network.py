"""The golden tensors: free running bit for bit, and each layer fed the golden output of the layer before."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch
from cedar.kernels.fp4 import pack_fp4_e4m3, pack_fp4_e8m0, unpack_fp4_e4m3, unpack_fp4_e8m0
from cedar.kernels.fp8 import unpack_window_rows
from cedar.kernels.paging import Plane, gather_rows, scatter_rows
from cedar.model.network import Network
from cedar.model.schedule import LayerMode
from cedar.model.sources import Selection
from cedar.model.state import KVMemory, SequenceState
from cedar.model.step import Step
from cedar.model.verify import TensorResult, verify_network

Tensors = dict[str, torch.Tensor]


def not_exact(results: list[TensorResult]) -> list[str]:
    """Names of the tensors that differ.

    `pre` may by an ulp: torch's sigmoid depends on the CPU's vector width.
    """
    return [
        r.name
        for r in results
        if r.compared and not r.exact and not (r.name.endswith(".pre") and (r.relative_l2 or 0) < 2**-22)
    ]


def test_every_golden_tensor_comes_out_free_running(drafting: Network, golden: Path) -> None:
    results = verify_network(drafting, str(golden / "expected.safetensors"))
    assert not_exact(results) == []
    left_out = {r.name for r in results if not r.compared}
    assert left_out == {"decode/input_ids", "image/input_ids", "text/input_ids"}
    kinds = Counter(r.name.rpartition(".")[2] for r in results if r.compared)
    assert (
        kinds["stream"] == kinds["pre"] == kinds["attn_out"] == kinds["ffn_out"] == kinds["window_kv"] == 24
    )
    assert (kinds["topk"], kinds["global_kv"], kinds["index_k"], kinds["engram_hash"]) == (10, 6, 6, 4)
    assert all(r.note == "" for r in results if r.compared)


def test_ced_with_decoder_bounded_replay(network: Network, golden: Path) -> None:
    results = verify_network(network, str(golden / "expected_ced.safetensors"))
    compared = {r.name for r in results if r.compared}
    assert not_exact(results) == []
    assert compared == {f"{p}/{t}" for p in ("short", "long") for t in ("full_logits", "logits", "tokens")}


def test_verification_in_small_chunks_gives_the_same(golden: Path, network: Network) -> None:
    small = dataclasses.replace(network, chunk_tokens=37)
    assert not_exact(verify_network(small, str(golden / "expected.safetensors"))) == []


def test_verification_sees_a_wrong_weight(golden: Path, network: Network) -> None:
    assert network.text is not None
    wrong = dataclasses.replace(network, text=dataclasses.replace(network.text, norm=network.text.norm * 2))
    results = {r.name: r for r in verify_network(wrong, str(golden / "expected.safetensors"))}
    assert results["text/final_normed"].exact is False
    assert results["text/final_normed"].relative_l2 == pytest.approx(1.0)
    assert results["text/layer11.stream"].exact


def test_public_logits(network: Network, golden: Path, expected: Tensors, expected_ced: Tensors) -> None:
    every = network.logits(expected["text/input_ids"], replay=False)
    assert every.dtype == torch.float32
    assert torch.equal(every, expected["text/logits"][0])
    image = (golden / "image.png").read_bytes()
    ids = expected["image/input_ids"][0].tolist()
    assert torch.equal(network.logits(ids, images=[image], replay=False), expected["image/logits"][0])
    last = network.logits(expected_ced["long/input_ids"])
    assert torch.equal(last, expected_ced["long/logits"][:1])
    exact = network.logits(expected_ced["short/input_ids"])
    assert torch.equal(exact, network.logits(expected_ced["short/input_ids"], replay=False)[-1:])


@pytest.mark.parametrize("prompt", ["text", "image"])
def test_each_layer_fed_the_golden_one_below(network: Network, expected: Tensors, prompt: str) -> None:
    """Golden stream and pre of the layer before, the source's golden entries, keys and selection."""
    assert network.text is not None
    ids = expected[f"{prompt}/input_ids"][0].tolist()
    memory, seq = network.own_sequence(ids)
    if prompt == "image":
        _mark_image(seq, expected)
    for plan in network.plan[1:]:
        below = f"{prompt}/layer{plan.layer - 1:02d}"
        name = f"{prompt}/layer{plan.layer:02d}"
        step = Step(memory, network.config, [(seq, 0, len(ids))])
        selection = _golden_selection(network, memory, seq, expected, prompt, plan.layer, step)
        found = network.text.look_up(network.text.hash_rows(step, range(12)))
        captured: Tensors = {}
        network.text.layers[plan.layer].run(
            expected[f"{below}.stream"][0],
            expected[f"{below}.pre"][0],
            step,
            selection,
            found.get(plan.layer),
            observe=captured.__setitem__,
        )
        for key, got in captured.items():
            want = expected[f"{prompt}/{key}"][0]
            if key.endswith("topk"):
                assert torch.equal(got, want), key
            else:
                error = (got.double() - want.double()).norm() / want.double().norm()
                assert error < 1e-3, (key, float(error))
        ring = unpack_window_rows(memory.rings[0, plan.layer], network.config.head_dim)
        _nearly_all_equal(ring, expected[f"{name}.window_kv"][0])
        if plan.mode is LayerMode.FULL:
            main, index = _stored(network, memory, seq, plan.layer)
            _nearly_all_equal(main, expected[f"{name}.global_kv"][0])
            _nearly_all_equal(index, expected[f"{name}.index_k"][0])


def _nearly_all_equal(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert (got == want).double().mean() >= 0.995


def _mark_image(seq: SequenceState, expected: Tensors) -> None:
    from cedar.model.state import ImageSpan

    inside = (expected["image/token_types"][0] >= 0).nonzero().squeeze(1)
    _, _, rows, columns = expected["image/grid"].tolist()
    seq.images = (ImageSpan(int(inside[0]), len(inside), rows, columns, b"image"),)


def _planes(network: Network, layer: int) -> list[Plane]:
    return [Plane(p.offset, p.row_bytes, p.rows) for p in network.layout.source(layer).planes]


def _stored(
    network: Network, memory: KVMemory, seq: SequenceState, layer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    count = seq_length(seq) // network.layout.source(layer).ratio
    table, entries = torch.tensor([seq.pages]), torch.arange(count)
    rows = [
        gather_rows(memory.pages, plane, table, torch.zeros_like(entries), entries)
        for plane in _planes(network, layer)
    ]
    return unpack_fp4_e4m3(rows[0], rows[1]), unpack_fp4_e8m0(rows[2], rows[3])


def seq_length(seq: SequenceState) -> int:
    return len(seq.ids)


def _golden_selection(
    network: Network,
    memory: KVMemory,
    seq: SequenceState,
    expected: Tensors,
    prompt: str,
    layer: int,
    step: Step,
) -> Selection:
    """What golden lower layers leave for `layer`: entries and keys in pages, the selection or the pool."""
    plan = network.plan[layer]
    if plan.kv_source is None or plan.mode is LayerMode.FULL:
        return Selection()
    source = f"{prompt}/layer{plan.kv_source:02d}"
    packed = (
        *pack_fp4_e4m3(expected[f"{source}.global_kv"][0]),
        *pack_fp4_e8m0(expected[f"{source}.index_k"][0]),
    )
    entries = torch.arange(packed[0].shape[0])
    for plane, rows in zip(_planes(network, plan.kv_source), packed, strict=True):
        scatter_rows(memory.pages, plane, torch.tensor([seq.pages]), torch.zeros_like(entries), entries, rows)
    if plan.mode is LayerMode.REUSE:
        return Selection(entries=expected[f"{prompt}/layer{plan.index_source:02d}.topk"][0])
    return Selection(candidates=_golden_pool(network, expected, prompt, plan.kv_source, memory, step))


def _golden_pool(
    network: Network, expected: Tensors, prompt: str, source: int, memory: KVMemory, step: Step
) -> torch.Tensor:
    """The pool is no golden tensor: the source's own selecting part gives it, from golden inputs."""
    assert network.text is not None
    below = f"{prompt}/layer{source - 1:02d}"
    selection = Selection()
    rings = memory.rings.clone()
    network.text.layers[source].run(
        expected[f"{below}.stream"][0], expected[f"{below}.pre"][0], step, selection, None, produce=False
    )
    memory.rings.copy_(rings)
    assert selection.candidates is not None
    return selection.candidates
