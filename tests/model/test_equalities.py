"""One result however a sequence is run: in chunks, by decode, in a batch, from a prefix, after a resume.

Memory starts full of leftovers, and pages lie in another order than the sequence's: see conftest.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cedar.model.images import PreparedImage
from cedar.model.inputs import image_spans
from cedar.model.network import Network
from cedar.model.state import ImageSpan, KVMemory, SequenceState
from cedar.model.step import Span, Step, WindowPlan

from .sequences import leftover_memory, run, sequence

Tensors = dict[str, torch.Tensor]
Features = dict[bytes, torch.Tensor]
WINDOW = 16
PAGE = 32


@pytest.fixture(scope="module")
def ids(expected_ced: Tensors) -> list[int]:
    """209 tokens of prompt and 32 generated ones."""
    return expected_ced["long/input_ids"].tolist() + expected_ced["long/tokens"].tolist()


@pytest.fixture(scope="module")
def pictured(
    network: Network, golden: Path, expected: Tensors, ids: list[int]
) -> tuple[list[int], tuple[ImageSpan, ...], Features]:
    """A prompt with two images that touch and one more, among text."""
    image: PreparedImage = network.prepare((golden / "image.png").read_bytes())
    span = [network.config.image_token_id] * image.plan.span_length
    prompt = [0, *ids[5:24], *span, *span, *ids[30:60], *span, *ids[60:75]]
    spans = image_spans(prompt, [(image.plan, image.content_hash)] * 3, network.config.image_token_id)
    return prompt, spans, {image.content_hash: network.encode_image(image)}


def state_of(network: Network, memory: KVMemory, seq: SequenceState) -> list[torch.Tensor]:
    """Everything that the sequence may still read: readable ring rows, tails in use, pages it has written."""
    window, split = network.config.window, network.config.decoder_start_layer
    parts = []
    for layers, start in ((slice(0, split), seq.encoder_start), (slice(split, None), seq.decoder_start)):
        positions = torch.arange(max(start, seq.length - window), seq.length)
        parts.append(memory.rings[seq.slot, layers][:, positions % window])
    parts.append(memory.tails[seq.slot, :, :, : seq.length % 2])
    for source in network.layout.sources:
        for plane in source.planes:
            rows = []
            for entry in range(seq.length // source.ratio):
                page, row = divmod(entry, plane.rows)
                at = plane.offset + row * plane.row_bytes
                rows.append(memory.pages[seq.pages[page], at : at + plane.row_bytes])
            parts += rows
    return parts


def same_state(
    network: Network, a: tuple[KVMemory, SequenceState], b: tuple[KVMemory, SequenceState]
) -> None:
    assert (a[1].length, a[1].encoder_start, a[1].decoder_start) == (
        b[1].length,
        b[1].encoder_start,
        b[1].decoder_start,
    )
    for left, right in zip(state_of(network, *a), state_of(network, *b), strict=True):
        assert torch.equal(left, right)


def random_cuts(rng: random.Random, end: int, largest: int, start: int = 0) -> list[int]:
    cuts = [start]
    while cuts[-1] < end:
        cuts.append(min(end, cuts[-1] + rng.randint(1, largest)))
    return cuts[1:]


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("length", [1, 2, 15, 17, 33, 64, 209])
def test_chunked_prefill_equals_one_shot(
    network: Network, memory: KVMemory, ids: list[int], length: int, replay: bool
) -> None:
    rng = random.Random(length)
    whole = sequence(network, ids[:length], slot=1, first_page=10)
    logits = run(network, memory, whole, [length], replay=replay)
    for largest in (5, 40) if length < 60 else (16, 90):
        seq = sequence(network, ids[:length], slot=2, first_page=30)
        chunked = run(network, memory, seq, random_cuts(rng, length, largest), replay=replay)
        assert torch.equal(chunked, logits)
        same_state(network, (memory, whole), (memory, seq))


def test_prefill_one_token_at_a_time(network: Network, memory: KVMemory, ids: list[int]) -> None:
    whole = sequence(network, ids[:53], slot=1, first_page=10)
    logits = run(network, memory, whole, [53])
    seq = sequence(network, ids[:53])
    assert torch.equal(run(network, memory, seq, list(range(1, 54))), logits)
    same_state(network, (memory, whole), (memory, seq))


def test_chunks_that_cut_images(
    network: Network,
    memory: KVMemory,
    pictured: tuple[list[int], tuple[ImageSpan, ...], Features],
) -> None:
    prompt, spans, features = pictured
    whole = sequence(network, prompt, slot=1, first_page=10)
    whole.images = spans
    logits = run(network, memory, whole, [len(prompt)], features=features)
    rng = random.Random(7)
    for largest in (5, 9, 50):
        seq = sequence(network, prompt, slot=4, first_page=20)
        seq.images = spans
        cuts = random_cuts(rng, len(prompt), largest)
        assert torch.equal(run(network, memory, seq, cuts, features=features), logits)
        same_state(network, (memory, whole), (memory, seq))


def test_small_blocks_of_scores_and_decoder_rows_change_nothing(
    network: Network, memory: KVMemory, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    logits = run(network, memory, sequence(network, ids[:150]), [150], replay=False)
    ced = run(network, memory, sequence(network, ids[:150]), [150], decoder_from=90)
    monkeypatch.setattr("cedar.model.sources._SCORE_BYTES", 5000)
    assert torch.equal(run(network, memory, sequence(network, ids[:150]), [150], replay=False), logits)
    small = dataclasses.replace(network, chunk_tokens=11)
    assert torch.equal(run(small, memory, sequence(network, ids[:150]), [60, 150], decoder_from=90), ced)


@pytest.mark.parametrize("prompt", [5, 50, 77])
def test_prefill_then_decode_equals_a_longer_prefill(
    network: Network, memory: KVMemory, ids: list[int], prompt: int
) -> None:
    seq = sequence(network, ids[:100], slot=1, first_page=10)
    run(network, memory, seq, [prompt], replay=False)
    stepped = [network.decode(memory, [seq])[0] for _ in range(18)]
    every = network.logits(ids[: prompt + 18], replay=False)
    assert torch.equal(torch.stack(stepped), every[prompt:])
    longer = sequence(network, ids[:100], slot=2, first_page=20)
    assert torch.equal(run(network, memory, longer, [prompt + 18], replay=False), every[-1])
    same_state(network, (memory, seq), (memory, longer))


def test_a_batch_equals_its_members_alone(network: Network, ids: list[int]) -> None:
    memory = leftover_memory(network, pages=64, slots=8)
    lengths = [1, 2, 15, 16, 17, 40, 63, 64]

    def fresh(slot: int, memory: KVMemory) -> SequenceState:
        rotated = ids[slot * 7 :] + ids[: slot * 7]
        seq = sequence(network, rotated[:100], slot=slot, first_page=8 * slot)
        run(network, memory, seq, [lengths[slot]])
        return seq

    together = [fresh(slot, memory) for slot in range(8)]
    steps = [network.decode(memory, together) for _ in range(4)]
    alone_memory = leftover_memory(network, pages=64, slots=8)
    for slot in range(8):
        alone = fresh(slot, alone_memory)
        for step in steps:
            assert torch.equal(network.decode(alone_memory, [alone])[0], step[slot])
        same_state(network, (memory, together[slot]), (alone_memory, alone))


def test_members_may_come_and_go(network: Network, ids: list[int]) -> None:
    memory = leftover_memory(network)
    seqs = [sequence(network, ids[i:80] + ids[:i], slot=i, first_page=8 * i) for i in range(4)]
    for i, seq in enumerate(seqs):
        run(network, memory, seq, [20 + 5 * i])
    got: list[list[torch.Tensor]] = [[] for _ in seqs]
    rng = random.Random(3)
    for _ in range(10):
        members = rng.sample(range(4), rng.randint(1, 4))
        for i, row in zip(members, network.decode(memory, [seqs[i] for i in members]), strict=True):
            got[i].append(row)
    for i, seq in enumerate(seqs):
        alone = sequence(network, seq.ids, slot=5, first_page=40)
        run(network, memory, alone, [20 + 5 * i])
        assert all(torch.equal(network.decode(memory, [alone])[0], row) for row in got[i])


@pytest.mark.parametrize("turn", [1, 9, 15, 16, 17, 60])
def test_a_next_turn_with_kept_window_state(
    network: Network, memory: KVMemory, ids: list[int], turn: int
) -> None:
    """The state at n goes on: CED runs the decoder over the last min(T - n, W) tokens of the new prompt."""
    seq = sequence(network, ids[: 120 + turn], slot=1, first_page=10)
    run(network, memory, seq, [100])
    for _ in range(20):
        network.decode(memory, [seq])
    start = seq.decoder_start
    rng = random.Random(turn)
    logits = run(network, memory, seq, random_cuts(rng, 120 + turn, 13, start=120))
    assert start == 100 - WINDOW
    assert seq.decoder_start == (120 + turn - WINDOW if turn >= WINDOW else start)
    if turn >= WINDOW:  # then nothing of the decoder's past is read: equal to a cold run
        cold = sequence(network, ids[: 120 + turn], slot=2, first_page=30)
        assert torch.equal(run(network, memory, cold, [120 + turn]), logits)
        same_state(network, (memory, seq), (memory, cold))
    else:  # the decoder's past is read: equal to every decoder layer run from where its window starts
        cold = sequence(network, ids[: 120 + turn], slot=2, first_page=30)
        assert torch.equal(run(network, memory, cold, [120 + turn], decoder_from=start), logits)
        same_state(network, (memory, seq), (memory, cold))


@pytest.mark.parametrize("cut", [PAGE, 3 * PAGE, 5 * PAGE])
def test_page_cut_prefix_reuse_with_kept_window_state(
    network: Network, memory: KVMemory, ids: list[int], cut: int
) -> None:
    """A sequence stopped at a page boundary, all of its state moved elsewhere, equals a cold run."""
    first = sequence(network, ids[:cut], slot=1, first_page=10)
    network.prefill(memory, first, cut)
    other = leftover_memory(network)
    second = sequence(network, ids[:209], slot=3, first_page=40)
    for i, page in enumerate(first.pages):
        other.pages[second.pages[i]] = memory.pages[page]
    other.rings[3], other.tails[3] = memory.rings[1], memory.tails[1]
    second.length = cut
    logits = run(network, other, second, random_cuts(random.Random(cut), 209, 40, start=cut))
    cold = sequence(network, ids[:209], slot=2, first_page=20)
    assert torch.equal(run(network, memory, cold, [209]), logits)
    same_state(network, (memory, cold), (other, second))


class PlainWindow(Step):
    """A step whose window keys are the chunk's own, found by comparing positions: no rings."""

    start: int

    def open_window(self, layer: int) -> WindowPlan:
        row_bytes = self.memory.rings.shape[-1]
        return WindowPlan(torch.empty(self.rows, row_bytes, dtype=torch.uint8), torch.arange(self.rows))

    def close_window(self, layer: int, buffer: torch.Tensor) -> None:
        return None

    def window_rows(self, decoder: bool) -> torch.Tensor:
        positions = self.positions.tolist()
        table = []
        for i in positions:
            readable = [n for n, j in enumerate(positions) if max(self.start, i - WINDOW + 1) <= j <= i]
            table.append([-1] * (WINDOW - len(readable)) + readable)
        return torch.tensor(table)


def bounded_run(
    network: Network, memory: KVMemory, seq: SequenceState, start: int, end: int, features: Features | None
) -> torch.Tensor:
    """Encoder over [start, end) with window reads that stop at `start`, decoder over the last W tokens."""
    assert network.text is not None
    config = network.config
    first = config.decoder_start_layer

    def plain(spans: list[Span], lowest: int) -> PlainWindow:
        step = PlainWindow(memory, config, spans)
        step.start = lowest
        return step

    step = plain([(seq, start, end)], start)
    streams, pre = network.text.embed(step, features)
    streams, pre = network.text.run(streams, pre, step, range(first))
    network.text.produce(streams, pre, step, first)
    tail = max(start, end - WINDOW)
    step = plain([(seq, tail, end)], tail)
    rows = slice(tail - start, None)
    streams, pre = network.text.run(
        streams[rows], pre[rows], step, range(first, config.layers), produced=first
    )
    return network.text.logits(streams[-1:], pre[-1:])[0]


@pytest.mark.parametrize(
    ("hit", "end"), [(PAGE, 33), (PAGE, 50), (2 * PAGE, 100), (3 * PAGE, 209), (6 * PAGE, 200)]
)
@pytest.mark.parametrize("largest", [9, 200])
def test_a_page_hit_with_replay(network: Network, ids: list[int], hit: int, end: int, largest: int) -> None:
    """Equal to a run whose window reads are bounded the same way; loaded pages are read and never written."""
    donor = leftover_memory(network)
    cold = sequence(network, ids[:hit], slot=1, first_page=10)
    network.prefill(donor, cold, hit)

    def loaded() -> tuple[KVMemory, SequenceState]:
        memory = leftover_memory(network)
        seq = sequence(network, ids[:end], slot=2, first_page=20)
        for i, page in enumerate(cold.pages):
            memory.pages[seq.pages[i]] = donor.pages[page]
        seq.length = seq.encoder_start = max(0, hit - WINDOW)
        seq.write_from = hit
        return memory, seq

    memory, seq = loaded()
    before = memory.pages[seq.pages[: hit // PAGE]].clone()
    cuts = random_cuts(random.Random(hit + largest), end, largest, start=seq.length)
    logits = run(network, memory, seq, cuts)
    assert torch.equal(memory.pages[seq.pages[: hit // PAGE]], before)
    assert (seq.encoder_start, seq.decoder_start) == (max(0, hit - WINDOW), end - WINDOW)
    other, plain = loaded()
    assert torch.equal(bounded_run(network, other, plain, hit - WINDOW, end, None), logits)
    assert torch.equal(other.pages[plain.pages], memory.pages[seq.pages])


def test_a_page_hit_differs_from_a_cold_run_only_by_its_bounded_reads(
    network: Network, ids: list[int]
) -> None:
    """The replay is an approximation, and a small one: what differs is what the window start hides."""
    memory = leftover_memory(network)
    cold = sequence(network, ids[:150], slot=1, first_page=10)
    exact = run(network, memory, cold, [150])
    warm = sequence(network, ids[:150], slot=2, first_page=20)
    warm.pages = cold.pages[:3] + warm.pages[3:]
    warm.length = warm.encoder_start = 3 * PAGE - WINDOW
    warm.write_from = 3 * PAGE
    replayed = run(network, memory, warm, [150])
    assert not torch.equal(exact, replayed)
    assert (exact - replayed).norm() / exact.norm() < 0.5


@pytest.mark.parametrize("prompt", [3, 16, 50, 100])
@pytest.mark.parametrize("generated", [1, 18])
def test_a_resume_gives_what_decode_had(
    network: Network, memory: KVMemory, ids: list[int], prompt: int, generated: int
) -> None:
    """Prompt plus generated tokens prefilled elsewhere; the decoder starts where the first prefill's did."""
    seq = sequence(network, ids[:160], slot=1, first_page=10)
    run(network, memory, seq, [prompt])
    for _ in range(generated):
        logits = network.decode(memory, [seq])[0]
    again = sequence(network, ids[:160], slot=2, first_page=30)
    cuts = random_cuts(random.Random(prompt), prompt + generated, 29)
    resumed = run(network, memory, again, cuts, decoder_from=max(0, prompt - WINDOW))
    assert torch.equal(resumed, logits)
    same_state(network, (memory, seq), (memory, again))
    assert torch.equal(network.decode(memory, [seq]), network.decode(memory, [again]))


def test_a_resume_after_a_page_hit(network: Network, ids: list[int]) -> None:
    """The hit's window start comes with the request; then its generated tokens come out as they were."""
    memory = leftover_memory(network)
    donor = sequence(network, ids[: 2 * PAGE], slot=0, first_page=0)
    network.prefill(memory, donor, 2 * PAGE)

    def hit(slot: int, first_page: int) -> SequenceState:
        seq = sequence(network, ids[:200], slot=slot, first_page=first_page)
        seq.pages[:2] = donor.pages
        seq.length = seq.encoder_start = 2 * PAGE - WINDOW
        seq.write_from = 2 * PAGE
        return seq

    seq = hit(1, 10)
    run(network, memory, seq, [90])
    for _ in range(21):
        logits = network.decode(memory, [seq])[0]
    again = hit(2, 20)
    assert torch.equal(run(network, memory, again, [100, 111], decoder_from=90 - WINDOW), logits)
    same_state(network, (memory, seq), (memory, again))


def test_decoder_from_below_the_start_of_a_prefill_goes_on_from_the_rings(
    network: Network, memory: KVMemory, ids: list[int]
) -> None:
    seq = sequence(network, ids[:140], slot=1, first_page=10)
    run(network, memory, seq, [100])
    first = seq.decoder_start
    run(network, memory, seq, [104, 110], decoder_from=90)
    assert seq.decoder_start == first
    cold = sequence(network, ids[:140], slot=2, first_page=30)
    run(network, memory, cold, [110], decoder_from=first)
    same_state(network, (memory, seq), (memory, cold))


@pytest.mark.parametrize("mutate", [lambda s: s.ids.append(5), lambda s: s.pages.append(60)])
def test_what_lies_beyond_the_length_is_not_looked_at(
    network: Network, memory: KVMemory, ids: list[int], mutate: Callable[[SequenceState], None]
) -> None:
    plain = sequence(network, ids[:60], slot=1, first_page=10)
    logits = run(network, memory, plain, [40])
    seq = sequence(network, ids[:60], slot=2, first_page=20)
    mutate(seq)
    assert torch.equal(run(network, memory, seq, [40]), logits)
