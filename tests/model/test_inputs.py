"""What `logits` refuses, each time with the field, the value and the limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cedar.model import load_network
from cedar.model.errors import InputError
from cedar.model.images import ImagePlan
from cedar.model.inputs import image_spans
from cedar.model.network import Network
from PIL import Image

IMAGE = 3


@pytest.fixture(scope="module")
def picture(golden: Path) -> bytes:
    return (golden / "image.png").read_bytes()


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "at least one token id"),
        ([0, 640], r"input_ids\[1\]=640, must be an integer from 0 to vocab_size - 1 = 639"),
        ([0, -1], r"input_ids\[1\]=-1"),
        ([0, 1.0], r"input_ids\[1\]=1.0"),
        ([True], r"input_ids\[0\]=True"),
        ([5] * 513, "input_ids length=513, must be at most max_position_embeddings, 512"),
        (torch.zeros(0, dtype=torch.int64), "at least one token id"),
        (torch.zeros(2, 3, dtype=torch.int64), r"input_ids shape=\[2, 3\], must be \[T\] or \[1, T\]"),
        (torch.zeros(3), "input_ids dtype=torch.float32, must be an integer type"),
        (torch.tensor([5, 1000]), r"input_ids\[1\]=1000"),
    ],
)
def test_bad_ids(network: Network, ids: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        network.logits(ids)


def test_images_and_their_tokens_must_match(network: Network, picture: bytes) -> None:
    span = [IMAGE] * 17
    with pytest.raises(InputError, match="images=0, must be as many as input_ids hold: tokens 1 to 18"):
        network.logits([0, *span, 5])
    with pytest.raises(InputError, match="images=1, must be 0, the number of images that input_ids hold"):
        network.logits([0, 5], images=[picture])
    with pytest.raises(
        InputError, match=r"images\[0\] tokens from position 1=16, must be 17 for a grid of 3 x 4"
    ):
        network.logits([0, *span[:-1], 5], images=[picture])
    with pytest.raises(InputError, match="images=1, must be as many"):
        network.logits([0, *span, IMAGE, 5], images=[picture])
    with pytest.raises(InputError, match="images=2, must be 1"):
        network.logits([0, *span, 5], images=[picture, picture])


def test_images_come_as_bytes_pillow_or_prepared(network: Network, golden: Path, picture: bytes) -> None:
    ids = [0, 7, *[IMAGE] * 17, 9]
    wanted = network.logits(ids, images=[picture])
    with Image.open(golden / "image.png") as image:
        assert torch.equal(network.logits(ids, images=[image]), wanted)
    assert torch.equal(network.logits(ids, images=[network.prepare(picture)]), wanted)
    for wrong in ("image.png", 5, None):
        with pytest.raises(InputError, match="file bytes, PIL images or prepared images"):
            network.logits(ids, images=[wrong])  # type: ignore[list-item]
    with pytest.raises(InputError, match=r"^images\[0\]: bytes="):
        network.logits(ids, images=[b"not an image"])
    with pytest.raises(InputError, match=r"^images\[1\]: bytes="):
        network.logits([*ids, *[IMAGE] * 17, 9], images=[picture, b"not an image"])


def test_touching_images_are_told_apart() -> None:
    plan = ImagePlan(width=1, height=1, patch_rows=1, patch_columns=1, rows=1, columns=2)
    wide = ImagePlan(width=1, height=1, patch_rows=1, patch_columns=1, rows=2, columns=2)
    found = image_spans(
        [0, *[IMAGE] * 13, 4, *[IMAGE] * 5], [(plan, b"a"), (wide, b"b"), (plan, b"c")], IMAGE
    )
    assert [(s.start, s.length, s.content_hash) for s in found] == [(1, 5, b"a"), (6, 8, b"b"), (15, 5, b"c")]


@pytest.mark.parametrize(
    ("features", "words"),
    [
        (None, "features of image 0=.missing."),
        ({}, "features of image 0=.missing."),
        ({b"h": torch.zeros(16, 128, dtype=torch.bfloat16)}, r"\[16, 128\].*\[17, 128\]"),
        ({b"h": torch.zeros(17, 128)}, "float32.*bfloat16"),
    ],
)
def test_prefill_needs_the_features_of_its_images(network: Network, features: Any, words: str) -> None:
    memory, seq = network.own_sequence([0, *[IMAGE] * 17, 8])
    plan = ImagePlan(width=1, height=1, patch_rows=1, patch_columns=1, rows=3, columns=4)
    seq.images = image_spans(seq.ids, [(plan, b"h")], IMAGE)
    network.prefill(memory, seq, 1, features)
    with pytest.raises(InputError, match=words):
        network.prefill(memory, seq, 5, features)


def test_decode_does_not_run_image_positions(network: Network) -> None:
    memory, seq = network.own_sequence([0, *[IMAGE] * 17, 8])
    plan = ImagePlan(width=1, height=1, patch_rows=1, patch_columns=1, rows=3, columns=4)
    seq.images = image_spans(seq.ids, [(plan, b"h")], IMAGE)
    network.prefill(memory, seq, 1)
    network.finish_prefill(memory, seq)
    with pytest.raises(InputError, match="position=1, must be outside"):
        network.decode(memory, [seq])


def test_a_stage_refuses_what_it_was_not_loaded_for(golden: Path, picture: bytes) -> None:
    encoder = load_network(golden, stage="encoder")
    with pytest.raises(InputError, match="stage='encoder'"):
        encoder.logits([5])
    prepared = encoder.prepare(picture)
    features = encoder.encode_image(prepared)
    assert (features.dtype, list(features.shape)) == (torch.bfloat16, [17, 128])
    prefill = load_network(golden, stage="prefill")
    with pytest.raises(InputError, match="stage='prefill'"):
        prefill.encode_image(prepared)
