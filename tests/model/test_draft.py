"""Drafted tokens: a state that does not know how many proposals were rejected. Golden ones: see
test_golden_network.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
from cedar.kernels.decode_tables import FIELDS
from cedar.model import load_network
from cedar.model.config import parse_config
from cedar.model.decode_step import DecodeInputs, fill_fields
from cedar.model.draft import Proposals
from cedar.model.engram import LookedUp
from cedar.model.errors import ConfigError, InputError
from cedar.model.inputs import image_spans
from cedar.model.network import Network
from cedar.model.schedule import check_drafting
from cedar.model.state import KVMemory, SequenceState
from cedar.model.tensors import stage_tensors
from cedar.model.verification import rows_kept
from cedar.model.verify_step import BlockRows, VerifyStep, commit_rows
from cedar.model.window_record import export_window, import_window

from .sequences import leftover_memory, run, sequence, snapshot, unchanged

Tensors = dict[str, torch.Tensor]
BLOCK = 5
TOLD = 28  # tokens a sequence
WINDOW = 16


@pytest.fixture(scope="module")
def ids(expected_ced: Tensors) -> list[int]:
    return expected_ced["long/input_ids"].tolist() + expected_ced["long/tokens"].tolist()


def wrong(token: int) -> int:
    return 5 + (token + 1) % 600


class Truth:
    """A sequence decoded one token at a time: its tokens, logits and records are what drafting must give.

    `records[n]` holds rings, draft rings, tails, the open page and starts when token n is the last one.
    """

    def __init__(self, network: Network, prompt: SequenceState, count: int, **prefill: object) -> None:
        self.memory = leftover_memory(network)
        self.seq = dataclasses.replace(prompt, ids=list(prompt.ids), pages=list(prompt.pages))
        first = run(network, self.memory, self.seq, [len(prompt.ids)], **prefill)
        self.tokens, self.logits = [int(first.argmax())], [first]
        self.records = [export_window(network, self.memory, self.seq)]
        while len(self.tokens) < count:
            self.seq.ids.append(self.tokens[-1])
            self.logits.append(network.decode(self.memory, [self.seq])[0])
            self.tokens.append(int(self.logits[-1].argmax()))
            self.records.append(export_window(network, self.memory, self.seq))

    def same_pages(self, network: Network, memory: KVMemory, seq: SequenceState) -> bool:
        """Whether every page that `seq` has sealed is this one's."""
        sealed = range(seq.length // network.layout.page_tokens)
        return all(
            torch.equal(memory.pages[seq.pages[i]], self.memory.pages[self.seq.pages[i]]) for i in sealed
        )


def room(network: Network, ids: list[int], more: int, **where: int) -> SequenceState:
    """A sequence of `ids` with pages for `more` tokens."""
    seq = sequence(network, [*ids, *[0] * more], **where)
    seq.ids = list(ids)
    return seq


@pytest.mark.parametrize("prompt", [1, 27, 64])
def test_any_pattern_of_rejections_leaves_the_state_of_single_steps(
    drafting: Network, ids: list[int], prompt: int
) -> None:
    """Crosses ring wraps, odd and even lengths, page ends, and proposals longer than a window."""
    rng = random.Random(prompt)
    seq = room(drafting, ids[:prompt], 50, slot=2, first_page=20)
    truth = Truth(drafting, room(drafting, ids[:prompt], 50, slot=5, first_page=40), TOLD)
    memory = leftover_memory(drafting)
    said = [int(run(drafting, memory, seq, [prompt]).argmax())]
    while len(said) < TOLD:
        seq.ids.append(said[-1])
        count = min(rng.choice([0, 1, 2, BLOCK, BLOCK, WINDOW + 4]), TOLD - 1 - len(said))
        right = rng.randint(0, count)
        proposed = truth.tokens[len(said) : len(said) + count]
        proposed[right:] = [wrong(token) for token in proposed[right:]]
        before = snapshot(memory)[1:]  # all but the pages
        verification = drafting.verify(memory, [seq], [proposed])
        assert all(torch.equal(a, b) for a, b in zip(snapshot(memory)[1:], before, strict=True))
        choice = verification.logits.argmax(-1).tolist()
        kept = rows_kept(proposed, choice)
        assert kept == right + 1
        verification.commit([kept])
        for row in range(kept):
            assert torch.equal(verification.logits[row], truth.logits[len(said) + row])
        said += choice[:kept]
        seq.ids += choice[: kept - 1]
        assert said == truth.tokens[: len(said)]
        assert seq.length == len(seq.ids)
        assert export_window(drafting, memory, seq) == truth.records[len(said) - 1]
    assert truth.same_pages(drafting, memory, seq)


def test_a_batch_of_all_kinds(drafting: Network, golden: Path, ids: list[int]) -> None:
    """Behind images, with and without proposals, at a page's end and a ring's wrap; each as it were alone."""
    image = drafting.prepare((golden / "image.png").read_bytes())
    features = {image.content_hash: drafting.encode_image(image)}
    pictured = [0, *ids[3:9], *[drafting.config.image_token_id] * image.plan.span_length, *ids[9:20]]
    prompts = [pictured, ids[:30], ids[7:40], ids[2:18]]
    memory = leftover_memory(drafting)
    seqs, truths = [], []
    for slot, prompt in enumerate(prompts):
        seqs.append(room(drafting, prompt, 40, slot=slot, first_page=10 * slot))
        if slot == 0:
            seqs[0].images = image_spans(
                prompt, [(image.plan, image.content_hash)], drafting.config.image_token_id
            )
        truths.append(Truth(drafting, seqs[-1], 10, features=features))
        run(drafting, memory, seqs[-1], [len(prompt)], features=features)
        seqs[-1].ids.append(truths[-1].tokens[0])
    said = [1] * 4
    for counts, right in (((5, 0, 3, 2), (2, 0, 3, 0)), ((1, 4, 0, 5), (1, 1, 0, 5))):
        proposed = []
        for number, truth in enumerate(truths):
            tokens = truth.tokens[said[number] : said[number] + counts[number]]
            proposed.append(tokens[: right[number]] + [wrong(t) for t in tokens[right[number] :]])
        verification = drafting.verify(memory, seqs, proposed)
        kept = []
        for number, rows in enumerate(verification.rows):
            choice = verification.logits[rows.start : rows.stop].argmax(-1).tolist()
            kept.append(rows_kept(proposed[number], choice))
            assert kept[-1] == right[number] + 1
            for row in range(kept[-1]):
                assert torch.equal(
                    verification.logits[rows.start + row], truths[number].logits[said[number] + row]
                )
            said[number] += kept[-1]
        verification.commit(kept)
        for number, seq in enumerate(seqs):
            seq.ids = [*prompts[number], *truths[number].tokens[: said[number]]]
            assert export_window(drafting, memory, seq) == truths[number].records[said[number] - 1]
            assert truths[number].same_pages(drafting, memory, seq)


def test_a_padded_step_is_the_tight_one(drafting: Network, ids: list[int]) -> None:
    """As a captured step has them: rows and sequences that repeat others and write nothing."""
    memory, twin = leftover_memory(drafting), leftover_memory(drafting)
    seqs = [room(drafting, ids[3 * i : 20 + 7 * i], 20, slot=i, first_page=10 * i) for i in range(3)]
    for seq in seqs:
        for some in (memory, twin):
            seq.length, seq.decoder_start = 0, 0
            run(drafting, some, seq, [len(seq.ids)])
        seq.ids.append(9 + seq.slot)
    proposed, kept = [[11, 12, 13], [], [14]], [3, 1, 1]
    tight = drafting.verify(memory, seqs, proposed)
    fields, block = torch.empty(FIELDS, 5, dtype=torch.int64), 6
    fill_fields(fields.numpy(), seqs)
    padded = torch.full((5, block), 17)
    for row, (seq, some) in enumerate(zip(seqs, proposed, strict=True)):
        padded[row, : 1 + len(some)] = torch.tensor([seq.ids[-1], *some])
    table = torch.zeros(5, 2, dtype=torch.int32)
    table[:3] = torch.tensor([seq.pages[:2] for seq in seqs])
    rows = BlockRows.padded(padded, torch.tensor([4, 1, 2, 1, 1]))
    step, taps = (
        VerifyStep(twin, drafting.config, DecodeInputs(fields, table), rows, 64),
        list[torch.Tensor](),
    )
    text, drafts = drafting.text, drafting.drafts
    assert text is not None
    assert drafts is not None
    offsets = [range(4), range(6, 7), range(12, 14)]
    engram = {}
    for seq, some in zip(seqs, proposed, strict=True):
        seq.ids.extend(some)
    for layer, parts in text.look_up_spans([(s, s.length, len(s.ids)) for s in seqs]).items():
        places = torch.zeros(5 * block, dtype=torch.int64)
        for rows_of_seq, first in zip(offsets, (0, 4, 5), strict=True):
            places[rows_of_seq.start : rows_of_seq.stop] = torch.arange(len(rows_of_seq)) + first
        engram[layer] = LookedUp(*(part[places] for part in parts))
    for seq, some in zip(seqs, proposed, strict=True):
        del seq.ids[len(seq.ids) - len(some) :]
    layers = range(drafting.config.layers)
    logits = text.logits(*text.run(*text.embed(step, None), step, layers, taps=taps, engram=engram))
    assert torch.equal(torch.cat([logits[r.start : r.stop] for r in offsets]), tight.logits)
    tight.commit(kept)
    commit_rows(step, taps, drafts.rings, torch.tensor([*kept, 1, 1]))
    assert unchanged(twin, snapshot(memory))


def test_drafting_with_its_own_proposals_gives_the_tokens_of_decode(
    drafting: Network, ids: list[int]
) -> None:
    truth = Truth(drafting, room(drafting, ids[:50], 40), 12)
    memory, seq = leftover_memory(drafting), room(drafting, ids[:50], 40)
    said = [int(run(drafting, memory, seq, [50]).argmax())]
    while len(said) < 12:
        seq.ids.append(said[-1])
        proposals = drafting.propose(memory, [seq])
        proposed = proposals.chosen([12 - len(said) - 1])
        verification = drafting.verify(memory, [seq], proposed)
        choice = verification.logits.argmax(-1).tolist()
        kept = rows_kept(proposed[0], choice)
        verification.commit([kept])
        said += choice[:kept]
        seq.ids += choice[: kept - 1]
    assert said == truth.tokens


def test_proposals_follow_a_sequence_wherever_it_goes(drafting: Network, ids: list[int]) -> None:
    """In chunks, after a resume, through a record and in a batch the rings are those of the plain way."""
    seq = room(drafting, ids[:100], 30, slot=1)
    memory = leftover_memory(drafting)
    run(drafting, memory, seq, [40])
    for _ in range(8):
        drafting.decode(memory, [seq])
    plain = drafting.propose(memory, [seq])
    again = room(drafting, ids[:100], 30, slot=2, first_page=10)
    run(drafting, memory, again, [11, 40, 48], decoder_from=40 - WINDOW)
    other = leftover_memory(drafting)
    moved = room(drafting, ids[:100], 30, slot=3, first_page=30)
    other.pages[moved.pages[0]] = memory.pages[seq.pages[0]]
    import_window(drafting, other, moved, export_window(drafting, memory, seq))
    stranger = room(drafting, ids[9:60], 30, slot=6, first_page=50)
    run(drafting, memory, stranger, [20])
    for got in (
        drafting.propose(memory, [again]),
        drafting.propose(other, [moved]),
        drafting.propose(memory, [stranger, seq]),
    ):
        assert torch.equal(got.logits[-1], plain.logits[0])
        assert torch.equal(got.confidence[-1], plain.confidence[0])


def test_records_between_workers_that_draft_and_that_do_not(
    network: Network, drafting: Network, ids: list[int]
) -> None:
    """Tokens go on the same; without the writer's rows proposals read what has been run since."""
    memory, seq = leftover_memory(drafting), room(drafting, ids[:40], 60, slot=1)
    run(drafting, memory, seq, [30])
    record = export_window(drafting, memory, seq)
    plain_memory, plain = leftover_memory(network), room(network, ids[:40], 60, slot=1)
    import_window(network, plain_memory, plain, record)
    bare = export_window(network, plain_memory, plain)
    assert len(bare) == len(record) - 3 * WINDOW * memory.draft_rings.shape[-1]
    back_memory, back = leftover_memory(drafting), room(drafting, ids[:40], 60, slot=1)
    import_window(drafting, back_memory, back, bare)
    assert (seq.draft_start, back.draft_start) == (30 - WINDOW, 30)
    assert drafting.propose(back_memory, [back]).logits.isfinite().all()
    for _ in range(4):
        expected = drafting.decode(memory, [seq])
        assert torch.equal(network.decode(plain_memory, [plain]), expected)
        assert torch.equal(drafting.decode(back_memory, [back]), expected)
    assert torch.equal(
        drafting.propose(back_memory, [back]).logits,
        drafting.propose(memory, [dataclasses.replace(seq, draft_start=30)]).logits,
    )


def test_what_is_wrong_is_refused_and_changes_nothing(
    network: Network, drafting: Network, ids: list[int]
) -> None:
    memory, seq = leftover_memory(drafting), room(drafting, ids[:30], 10)
    run(drafting, memory, seq, [30])
    seq.ids.append(7)
    before = snapshot(memory)
    with pytest.raises(InputError, match=r"pages=2.*3 to hold 65"):
        drafting.verify(memory, [seq], [[9] * 34])
    with pytest.raises(InputError, match=r"ids=33.*31"):
        drafting.verify(memory, [dataclasses.replace(seq, ids=[*seq.ids, 8, 9])], [[5]])
    with pytest.raises(InputError, match="drafting=False"):
        network.propose(leftover_memory(network), [seq])
    assert unchanged(memory, before)
    assert seq.ids == [*ids[:30], 7]
    verification = drafting.verify(memory, [seq], [[9, 9]])
    for kept in (0, 4):
        with pytest.raises(InputError, match=rf"kept\[0\]={kept}.*from 1 to 3"):
            verification.commit([kept])
    assert seq.length == 30


def test_what_each_stage_reads_of_the_draft_module(golden: Path) -> None:
    config = parse_config((golden / "config.json").read_bytes())
    read = {
        stage: {name for name in stage_tensors(config, stage, True) if name.startswith("mtp.")}
        for stage in ("encoder", "prefill", "decode", None)
    }
    assert read["encoder"] == set()
    assert len(read["prefill"]) == 3 * 3 + 3
    assert read["prefill"] < read["decode"] == read[None]
    assert not any(name.startswith("mtp.") for name in stage_tensors(config, "decode"))
    rings = load_network(golden, stage="prefill", drafting=True)
    memory, seq = rings.own_sequence([5, 6, 7])
    rings.prefill(memory, seq, 2)
    rings.finish_prefill(memory, seq)
    assert memory.draft_rings[0, :, :2].any()
    with pytest.raises(InputError, match="stage='prefill'"):
        rings.propose(memory, [seq])


def test_models_that_cannot_draft_are_refused(golden: Path) -> None:
    published = json.loads((golden / "config.json").read_text())
    low = parse_config(
        published | {"text_config": published["text_config"] | {"dspark_target_layer_ids": [3, 9]}}
    )
    with pytest.raises(ConfigError, match=r"dspark_target_layer_ids=\[3, 9\].*from 6 on"):
        check_drafting(low)
    none = dataclasses.replace(low, draft=None)
    with pytest.raises(ConfigError, match="num_nextn_predict_layers"):
        check_drafting(none)


def test_choosing_proposals() -> None:
    sure = torch.tensor([[4.0, 4.0, -4.0], [-1.0, 9.0, 9.0]])
    proposals = Proposals(torch.tensor([[1, 2, 3], [4, 5, 6]]), sure, torch.zeros(2, 3, 9))
    assert proposals.chosen([3, 3]) == [[1, 2, 3], [4, 5, 6]]
    assert proposals.chosen([3, 3], 0.5) == [[1, 2], []]
    assert proposals.chosen([1, -1]) == [[1], []]


@pytest.mark.parametrize(
    ("proposed", "said", "kept"),
    [([], [3], 1), ([3, 4], [3, 4, 5], 3), ([3, 4], [9, 4, 5], 1), ([3, 4], [3, 9, 5], 2), ([3, 4], [3], 1)],
)
def test_counting_what_stays(proposed: list[int], said: list[int], kept: int) -> None:
    assert rows_kept(proposed, said) == kept
