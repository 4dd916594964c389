"""Batches of the phase that is asked for; and the run's curve."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from cedar.training.assets import Assets
from cedar.training.batches import BatchShape, Feed
from cedar.training.curve import picture


@pytest.mark.parametrize("workers", [0, 1])
def test_phases_change_over_without_an_old_batch(narrow: Assets, workers: int) -> None:
    shapes = [BatchShape(rows=2, tokens=tokens, sparse=0.5, replay=0.5, queries=4) for tokens in (64, 128)]
    feed = Feed(narrow.tokenizer, narrow.config, shapes, seed=1, workers=workers)
    for phase in (0, 0, 1, 1, 0):
        batch = feed.next(phase)
        assert batch.ids.shape == (2, shapes[phase].tokens)
        assert batch.kinds.shape == batch.loss_weight.shape == batch.ids.shape
        assert batch.queries.shape == (2, 4)


def test_pictures_stand_where_the_conversation_has_them(narrow: Assets) -> None:
    shape = BatchShape(rows=6, tokens=256, sparse=0.5, replay=0.5, queries=4)
    batch = Feed(narrow.tokenizer, narrow.config, [shape], seed=5, workers=0).next(0)
    slots = [int(at) for pictures in batch.pictures for at in pictures.slots.flatten() if at >= 0]
    assert slots
    assert len(set(slots)) == len(slots)
    assert sorted(slots) == (batch.kinds.flatten() == 1).nonzero().flatten().tolist()
    assert not batch.loss_weight[batch.is_image].any()


def test_the_curve_is_a_picture_of_the_log() -> None:
    lines = [
        {"phase": "dense", "step": 0, "elapsed_s": 0.0},
        *(
            {
                "phase": "dense",
                "elapsed_s": 1.0 + s,
                "loss": 1.0,
                "answer_loss": 2.0 / (s + 1),
                "answer_accuracy": 0.6,
            }
            for s in range(3)
        ),
    ]
    root = ElementTree.fromstring(picture(lines))
    polylines = [node for node in root.iter() if node.tag.endswith("polyline")]
    assert [len(line.attrib["points"].split()) for line in polylines] == [3, 3]
    heights = [float(point.split(",")[1]) for point in polylines[0].attrib["points"].split()]
    assert heights == sorted(heights)  # a falling loss is drawn downwards
    with pytest.raises(ValueError, match="answer_loss"):
        picture([])
