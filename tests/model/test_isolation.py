"""What one sequence does never reaches another, and a step touches only the rows it must."""

from __future__ import annotations

import threading

import pytest
import torch
from cedar.model.errors import InputError
from cedar.model.network import Network
from cedar.model.state import KVMemory, SequenceState
from cedar.model.step import Step

from .sequences import LEFTOVER, leftover_memory, run, sequence, snapshot, unchanged

Tensors = dict[str, torch.Tensor]


def test_only_a_sequences_own_slot_and_pages_are_written(
    network: Network, memory: KVMemory, expected: Tensors
) -> None:
    ids = expected["text/input_ids"][0].tolist()
    seq = sequence(network, ids, slot=3, first_page=20)
    run(network, memory, seq, [40, 90])
    network.decode(memory, [seq])
    others = [i for i in range(memory.rings.shape[0]) if i != 3]
    assert (memory.rings[others] == LEFTOVER).all()
    assert memory.tails[others].isnan().all()
    foreign = [i for i in range(memory.pages.shape[0]) if i not in seq.pages]
    assert (memory.pages[foreign] == LEFTOVER).all()


def test_a_page_is_written_up_to_its_last_whole_group_and_no_further(
    network: Network, expected: Tensors
) -> None:
    memory = leftover_memory(network)
    seq = sequence(network, expected["text/input_ids"][0].tolist()[:11])
    run(network, memory, seq, [11])
    page = memory.pages[seq.pages[0]]
    for source in network.layout.sources:
        for plane in source.planes:
            used = plane.offset + 11 // source.ratio * plane.row_bytes
            assert (page[used : plane.offset + plane.rows * plane.row_bytes] == LEFTOVER).all()


def test_interleaved_prefills_do_not_meet(network: Network, memory: KVMemory, expected_ced: Tensors) -> None:
    ids = expected_ced["long/input_ids"].tolist()
    a = sequence(network, ids[:70], slot=0, first_page=0)
    b = sequence(network, ids[100:170], slot=1, first_page=10)
    alone = [run(network, memory, sequence(network, s.ids, slot=5, first_page=40), [70]) for s in (a, b)]
    for upto in (13, 29, 64, 70):
        network.prefill(memory, a, upto)
        network.prefill(memory, b, upto)
    assert torch.equal(network.finish_prefill(memory, b), alone[1])
    assert torch.equal(network.finish_prefill(memory, a), alone[0])


def test_a_network_may_be_shared_by_threads(network: Network, expected_ced: Tensors) -> None:
    ids = expected_ced["long/input_ids"].tolist()
    prompts = [ids[:40], ids[60:90], ids[100:160]]
    alone = [network.logits(prompt) for prompt in prompts]
    got: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        got[i] = network.logits(prompts[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[i], alone[i]) for i in range(3))


def test_a_long_prompts_scores_are_made_a_block_at_a_time(
    network: Network, memory: KVMemory, expected_ced: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cedar.model.sources as sources

    seen: list[int] = []
    score = sources.index_scores

    def counted(*args: object, **kwargs: object) -> torch.Tensor:
        result: torch.Tensor = score(*args, **kwargs)  # type: ignore[arg-type]
        seen.append(result.numel() * 8)
        return result

    monkeypatch.setattr(sources, "index_scores", counted)
    monkeypatch.setattr(sources, "_SCORE_BYTES", 20_000)
    run(network, memory, sequence(network, expected_ced["long/input_ids"].tolist()), [209])
    assert max(seen) <= 20_000


def test_no_window_row_of_a_chunk_is_overwritten_before_it_is_read(
    network: Network, memory: KVMemory
) -> None:
    """In a chunk longer than the window the rings keep the old rows until the layer has read them."""
    seq = SequenceState(slot=2, pages=[0, 1, 2], ids=[5] * 96, length=20)
    step = Step(memory, network.config, [(seq, 20, 60)])
    row_bytes = memory.rings.shape[-1]
    rows = torch.arange(40, dtype=torch.uint8).unsqueeze(1).expand(40, row_bytes).contiguous()
    before = memory.rings[2, 4].clone()
    buffer, places, staging = step.open_window(4)
    assert staging is not None
    kept, moved = (staging.sources >= 0).nonzero()[:, 0], (staging.targets >= 0).nonzero()[:, 0]
    buffer[kept] = staging.rings[staging.sources[kept]]
    buffer[staging.saved[moved]] = staging.rings[staging.targets[moved]]
    buffer[places] = rows
    assert torch.equal(memory.rings[2, 4], before)
    table = step.window_rows(decoder=False)
    for n, position in enumerate(range(20, 60)):
        for column, j in enumerate(range(position - 15, position + 1)):
            want = before[j % 16] if j < 20 else rows[j - 20]
            assert torch.equal(buffer[table[n, column]], want)
    staging.rings[staging.targets[moved]] = rows[moved]
    assert [int(memory.rings[2, 4, j % 16, 0]) for j in range(44, 60)] == list(range(24, 40))


def prefilled(network: Network, memory: KVMemory, ids: list[int], upto: int) -> SequenceState:
    seq = sequence(network, ids, slot=1)
    run(network, memory, seq, [upto])
    return seq


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.ids.__delitem__(slice(8, None)), "number of token ids, 8"),
        (lambda s: setattr(s, "pages", []), "pages=0, must be at least 1"),
        (lambda s: setattr(s, "slot", 8), "slot=8, must be from 0 to 7"),
    ],
)
def test_a_sequence_without_room_is_refused_before_anything_runs(
    network: Network, memory: KVMemory, change: object, words: str
) -> None:
    seq = prefilled(network, memory, [3 + i for i in range(20)], 8)
    change(seq)  # type: ignore[operator]
    before = snapshot(memory)
    for call in (lambda: network.decode(memory, [seq]), lambda: network.prefill(memory, seq, 9)):
        with pytest.raises(InputError, match=words):
            call()
    assert seq.length == 8
    assert unchanged(memory, before)


def test_calls_out_of_order_are_refused(network: Network, memory: KVMemory) -> None:
    seq = sequence(network, list(range(10, 50)), slot=1)
    with pytest.raises(InputError, match="prefill has just extended"):
        network.finish_prefill(memory, seq)
    network.prefill(memory, seq, 20)
    with pytest.raises(InputError, match="finish_prefill comes before decode"):
        network.decode(memory, [seq])
    with pytest.raises(InputError, match="upto=20, must be above the sequence's length, 20"):
        network.prefill(memory, seq, 20)
    with pytest.raises(InputError, match="decoder_from=2, must be at least 4"):
        network.prefill(memory, seq, 30, decoder_from=2)
    with pytest.raises(InputError, match="at least one sequence"):
        network.decode(memory, [])
    network.prefill(memory, seq, 30)
    network.finish_prefill(memory, seq)
    with pytest.raises(InputError, match="all different"):
        network.decode(memory, [seq, seq])


def test_a_decoder_start_beyond_the_prompt_is_refused(network: Network, memory: KVMemory) -> None:
    seq = sequence(network, list(range(10, 50)), slot=1)
    network.prefill(memory, seq, 20, decoder_from=20)
    with pytest.raises(InputError, match="decoder_from=20, must be below the sequence's length, 20"):
        network.finish_prefill(memory, seq)


def test_the_context_limit_holds_in_decode(network: Network) -> None:
    memory = leftover_memory(network, pages=20, slots=1)
    limit = network.config.max_position_embeddings
    seq = SequenceState(slot=0, pages=list(range(17)), ids=[5] * (limit + 2), length=limit)
    with pytest.raises(InputError, match=f"{limit + 1}, must be at most max_position_embeddings, {limit}"):
        network.decode(memory, [seq])
