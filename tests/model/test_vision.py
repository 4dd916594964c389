"""The vision tower against golden features, and the span it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cedar.model.config import parse_config
from cedar.model.errors import CheckpointError
from cedar.model.images import NEWLINE, SLOT, plan_image, prepare_image, token_types
from cedar.model.prompt_errors import ImageError
from cedar.model.vision import VisionTower, rope_tables, rotate_half
from safetensors.torch import load_file

GOLDEN = Path(__file__).parents[1] / "golden" / "v41-tiny"
CONFIG = parse_config((GOLDEN / "config.json").read_bytes())
EXPECTED = load_file(GOLDEN / "expected.safetensors")
TENSORS = {
    name: tensor
    for name, tensor in load_file(GOLDEN / "model-00001-of-00001.safetensors").items()
    if name.startswith(("vision.", "aligner.", "image_"))
}
TOWER = VisionTower.from_tensors(CONFIG.vision, TENSORS, text_width=CONFIG.hidden_size)
PREPARED = prepare_image((GOLDEN / "image.png").read_bytes(), CONFIG.vision)


def test_golden_features_bit_for_bit():
    features = TOWER.features(PREPARED.patches, PREPARED.plan)
    assert features.dtype == torch.bfloat16
    assert torch.equal(features, EXPECTED["image/features"])


def test_the_span_puts_learned_vectors_around_the_slots():
    rows = TOWER.span(PREPARED.patches, PREPARED.plan)
    kinds = torch.tensor(token_types(3, 4))
    assert rows.shape == (17, CONFIG.hidden_size)
    assert torch.equal(rows[kinds == SLOT], EXPECTED["image/features"])
    assert torch.equal(rows[0], TENSORS["image_start"])
    assert torch.equal(rows[-1], TENSORS["image_end"])
    assert (rows[kinds == NEWLINE] == TENSORS["image_newline"]).all()


@pytest.mark.parametrize("size", [(14, 14), (200, 30), (30, 200), (97, 61)])
def test_grids_that_are_no_multiple_of_the_downsampling_are_padded(size):
    vision = CONFIG.vision
    plan = plan_image(*size, vision)
    patches = torch.randn(plan.patch_rows * plan.patch_columns, 3, 14, 14, generator=torch.manual_seed(3))
    features = TOWER.features(patches.bfloat16(), plan)
    assert features.shape == (plan.rows * plan.columns, CONFIG.hidden_size)
    assert features.isfinite().all()


def test_rotation_keeps_lengths_and_depends_on_distance_alone():
    cos, sin = rope_tables(4, 5, CONFIG.vision)
    assert cos.shape == sin.shape == (20, 8)
    assert torch.equal(cos[0], torch.ones(8))
    x = torch.randn(1, 1, 16, generator=torch.manual_seed(1)).bfloat16().expand(20, 1, 16)
    turned = rotate_half(x, cos, sin)[:, 0].float()
    assert torch.allclose(turned.norm(dim=-1), x[:, 0].float().norm(dim=-1), rtol=0.01)
    scores = turned @ turned.T
    assert torch.allclose(scores[0, 6], scores[13, 19], rtol=0.02)  # one row and one column apart


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vision.norm.weight": None}, r"vision\.norm\.weight=.missing"),
        ({"aligner.w2.bias": torch.zeros(3).bfloat16()}, r"aligner\.w2\.bias shape=\[3\].*\[128\]"),
        ({"image_end": torch.zeros(128)}, "image_end dtype.*bfloat16"),
    ],
)
def test_missing_and_misshapen_tensors_are_named(change, named):
    tensors = {name: tensor for name, tensor in (TENSORS | change).items() if tensor is not None}
    with pytest.raises(CheckpointError, match=named):
        VisionTower.from_tensors(CONFIG.vision, tensors, text_width=CONFIG.hidden_size)


def test_patches_that_contradict_the_plan_are_refused():
    with pytest.raises(ImageError, match="patches"):
        TOWER.features(PREPARED.patches[1:], PREPARED.plan)
    with pytest.raises(ImageError, match="patches"):
        TOWER.features(PREPARED.patches.float(), PREPARED.plan)
