"""A checkpoint's forward pass against saved tensors: what `cedar model verify` prints.

Runs free, from token ids, and compares each saved tensor as the network gives it. Sections are told by their
names:

    P/input_ids, P/layerNN.*, P/logits   a prompt through every layer (`text`, `image`)
    decode/logits      greedy steps after the prompt of section `text`
    decode/draft_*     what the draft stages propose after each of them
    P/input_ids, P/full_logits, P/logits, P/tokens   a prompt by CED with decoder bounded replay, then greedy
    steps
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from typing import Final

import torch
from cedar.kernels.fp4 import unpack_fp4_e4m3, unpack_fp4_e8m0
from cedar.kernels.fp8 import unpack_window_rows
from cedar.kernels.paging import Plane, gather_rows
from cedar.kvstore import layout as page_layout
from cedar.model.checkpoint import Checkpoint
from cedar.model.comparison import Comparison, SavedTensors, TensorResult
from cedar.model.errors import InputError
from cedar.model.images import ImagePlan, PreparedImage, token_types
from cedar.model.inputs import image_spans, token_ids
from cedar.model.loading import build_network
from cedar.model.network import Network
from cedar.model.schedule import can_draft
from cedar.model.state import KVMemory, SequenceState
from cedar.model.step import Step

_IMAGE_FILE: Final = "image.png"  # where it lies beside the saved tensors, patches are made from it too

__all__ = ["TensorResult", "verify", "verify_network"]


def verify(
    path: str | os.PathLike[str], expected: str | os.PathLike[str], device: str = "cpu"
) -> list[TensorResult]:
    """Compare the checkpoint at `path` with safetensors file `expected`: one result for each saved tensor."""
    checkpoint = Checkpoint.open(os.fspath(path))
    drafting = can_draft(checkpoint.config)
    network = build_network(checkpoint, torch.device(device), None, drafting=drafting)
    return verify_network(network, os.fspath(expected))


def verify_network(network: Network, expected: str) -> list[TensorResult]:
    """As `verify`, of a loaded network of stage None. Holds one sequence and one saved tensor at a time."""
    saved = SavedTensors(expected)
    check = Comparison(saved)
    notes = {name: "input" for name in saved.names if name.endswith("/input_ids")}
    notes |= {name: "input" for name in saved.names if name.endswith(("/patches", "/grid"))}
    if network.drafts is None:
        notes |= {name: "the draft module is not loaded" for name in saved.names if "/draft_" in name}
    sections = sorted(
        {name.partition("/")[0] for name in saved.names if name.endswith("/input_ids")} - {"decode"}
    )
    for section in sections:
        if f"{section}/full_logits" in saved:
            _verify_ced(network, saved, check, section)
        else:
            _verify_prompt(network, saved, check, section)
    return check.results(notes)


def _verify_prompt(network: Network, saved: SavedTensors, check: Comparison, section: str) -> None:
    """Every layer for every token, with captures; `text` goes on with the steps of `decode`."""
    ids = token_ids(saved.read(f"{section}/input_ids"), network.config)
    steps = (
        saved.read("decode/input_ids").tolist() if section == "text" and "decode/input_ids" in saved else []
    )
    memory, seq = network.own_sequence(ids + steps)
    features = _section_images(network, saved, check, section, seq)
    prompt = len(ids)
    last = _run_observed(network, memory, seq, prompt, features, check, section)
    check.add(f"{section}/next", last.argmax().unsqueeze(0))
    _compare_state(network, memory, seq, check, section)
    for number in range(len(steps)):
        logits = network.decode(memory, [seq])
        check.add("decode/logits", logits, number)
        if network.drafts is not None:
            _compare_drafts(network, memory, seq, int(logits.argmax()), check, number)


def _compare_drafts(
    network: Network, memory: KVMemory, seq: SequenceState, token: int, check: Comparison, number: int
) -> None:
    """What the draft stages propose after greedy `token`."""
    block = replace(seq, ids=[*seq.ids[: seq.length], token])
    proposed = network.propose(memory, [block])
    ids = torch.cat((torch.tensor([token]), proposed.tokens[0].cpu()))
    check.add("decode/draft_ids", ids.unsqueeze(0), number)
    check.add("decode/draft_logits", proposed.logits.to(torch.bfloat16), number)  # saved in half precision
    check.add("decode/draft_confidence", proposed.confidence, number)


def _run_observed(
    network: Network,
    memory: KVMemory,
    seq: SequenceState,
    upto: int,
    features: dict[bytes, torch.Tensor],
    check: Comparison,
    section: str,
) -> torch.Tensor:
    """Run to `upto` in chunks, comparing every capture; the last position's logits [V]."""
    text = network.text
    if text is None:
        raise InputError("stage", network.stage, "None, to verify")
    logits = torch.empty(0)
    while seq.length < upto:
        start, end = seq.length, min(seq.length + network.chunk_tokens, upto)

        def observe(name: str, value: torch.Tensor, start: int = start) -> None:
            check.add(f"{section}/{name}", value, start)

        step = Step(memory, network.config, [(seq, start, end)])
        taps: list[torch.Tensor] | None = None if network.drafts is None else []
        streams, pre = text.embed(step, features)
        streams, pre = text.run(streams, pre, step, range(network.config.layers), observe=observe, taps=taps)
        if network.drafts is not None and taps:
            network.drafts.rings.write_step(step, taps)
        logits = text.logits(streams, pre, observe)
        check.add(f"{section}/logits", logits, start)
        seq.length = end
    return logits[-1]


def _compare_state(
    network: Network, memory: KVMemory, seq: SequenceState, check: Comparison, section: str
) -> None:
    """What the sequence keeps: rings, global entries and index keys, as they are read back."""
    config = network.config
    for layer in range(config.layers):
        window = unpack_window_rows(memory.rings[seq.slot, layer], config.head_dim)
        check.add(f"{section}/layer{layer:02d}.window_kv", window)
    for source in network.layout.sources:
        name = f"{section}/layer{source.layer:02d}"
        main, main_scales, index, index_scales = (
            _rows(memory, seq, plane, source) for plane in source.planes
        )
        check.add(f"{name}.global_kv", unpack_fp4_e4m3(main, main_scales))
        check.add(f"{name}.index_k", unpack_fp4_e8m0(index, index_scales))


def _rows(
    memory: KVMemory, seq: SequenceState, plane: page_layout.Plane, source: page_layout.SourceLayout
) -> torch.Tensor:
    """All rows of one plane so far, uint8 [entries, row_bytes]."""
    device = memory.pages.device
    entries = torch.arange(seq.length // source.ratio, device=device)
    table = torch.tensor([seq.pages], device=device)
    where = Plane(plane.offset, plane.row_bytes, plane.rows)
    return gather_rows(memory.pages, where, table, torch.zeros_like(entries), entries)


def _section_images(
    network: Network, saved: SavedTensors, check: Comparison, section: str, seq: SequenceState
) -> dict[bytes, torch.Tensor]:
    """Features of the section's one image, from its saved patches; sets the sequence's spans."""
    if f"{section}/patches" not in saved:
        return {}
    vision = network.vision
    if vision is None or network.config.vision is None:
        raise InputError("stage", network.stage, "None, of a checkpoint with vision, to verify images")
    if saved.beside(_IMAGE_FILE):
        prepared = network.prepare(saved.read_beside(_IMAGE_FILE))
        check.add(f"{section}/patches", prepared.patches)
        check.add(f"{section}/grid", torch.tensor(prepared.plan.grid))
    patches = saved.read(f"{section}/patches").to(network.device)
    patch_rows, patch_columns, rows, columns = saved.read(f"{section}/grid").tolist()
    side = network.config.vision.patch_size
    plan = ImagePlan(
        width=patch_columns * side,
        height=patch_rows * side,
        patch_rows=patch_rows,
        patch_columns=patch_columns,
        rows=rows,
        columns=columns,
    )
    name = hashlib.sha256(patches.cpu().view(torch.uint8).numpy().data).digest()
    image = PreparedImage(plan=plan, content_hash=name, patches=patches)
    seq.images = image_spans(seq.ids, [(plan, name)], network.config.image_token_id)
    check.add(f"{section}/features", vision.features(patches, plan))
    kinds = torch.full((len(seq.ids),), -1)
    kinds[seq.images[0].start : seq.images[0].end] = torch.tensor(token_types(rows, columns))
    check.add(f"{section}/token_types", kinds)
    return {name: network.encode_image(image)}


def _verify_ced(network: Network, saved: SavedTensors, check: Comparison, section: str) -> None:
    """CED prefill and greedy steps, and the same prompt through every layer."""
    ids = token_ids(saved.read(f"{section}/input_ids"), network.config)
    tokens = saved.read(f"{section}/tokens").tolist()
    memory, seq = network.own_sequence(ids)
    _run_to(network, memory, seq, len(ids), replay=False)
    check.add(f"{section}/full_logits", network.finish_prefill(memory, seq).unsqueeze(0))
    memory, seq = network.own_sequence(ids + tokens)
    _run_to(network, memory, seq, len(ids), replay=True)
    logits = network.finish_prefill(memory, seq)
    check.add(f"{section}/logits", logits.unsqueeze(0))
    for number in range(len(tokens)):
        check.add(f"{section}/tokens", logits.argmax().unsqueeze(0), number)
        logits = network.decode(memory, [seq])[0]
        check.add(f"{section}/logits", logits.unsqueeze(0), number + 1)


def _run_to(network: Network, memory: KVMemory, seq: SequenceState, upto: int, *, replay: bool) -> None:
    while seq.length < upto:
        network.prefill(memory, seq, min(seq.length + network.chunk_tokens, upto), replay=replay)
