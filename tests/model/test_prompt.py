"""Ids with images spread over their spans, against the golden prompt, and every refusal."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from cedar.model.chat import ChatOptions, ImagePart, Message
from cedar.model.config import parse_config
from cedar.model.images import PlannedImage, describe_image, plan_image
from cedar.model.prompt import Prompt, PromptFormat, PromptLimits, build_prompt
from cedar.model.prompt_errors import ImageError, PromptError
from cedar.model.state import ImageSpan
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

GOLDEN = Path(__file__).parents[1] / "golden" / "v41-tiny"
CONFIG = parse_config((GOLDEN / "config.json").read_bytes())
FORMAT = PromptFormat.open(str(GOLDEN))
LIMITS = PromptLimits.of(CONFIG)
PICTURE = describe_image((GOLDEN / "image.png").read_bytes(), CONFIG.vision)
EXPECTED = load_file(GOLDEN / "expected.safetensors")
GOLDEN_IDS = EXPECTED["image/input_ids"][0].tolist()
SPAN = ImageSpan(start=14, length=17, rows=3, columns=4, content_hash=PICTURE.content_hash)


def planned(width: int, height: int, name: bytes = b"h") -> PlannedImage:
    return PlannedImage(plan=plan_image(width, height, CONFIG.vision), content_hash=name)


def test_golden_prompt_from_one_image_token():
    before, after = GOLDEN_IDS[:14], GOLDEN_IDS[31:]
    prompt = build_prompt([*before, 3, *after], [PICTURE], LIMITS)
    assert prompt == Prompt(GOLDEN_IDS, (SPAN,))
    assert prompt.token_types == EXPECTED["image/token_types"][0].tolist()


def test_golden_prompt_already_spread():
    assert build_prompt(GOLDEN_IDS, [PICTURE], LIMITS) == Prompt(GOLDEN_IDS, (SPAN,))


def test_a_checkpoint_gives_its_format():
    text = FORMAT.encode_text("<think>Hi", 2)
    assert text == [0, 3, 3, *FORMAT.tokenizer.encode("<think>Hi")]
    data = (GOLDEN / "image.png").read_bytes()
    asked = Message(role="user", content=("Look:", ImagePart(data)))
    encoded = FORMAT.encode_chat([asked], ChatOptions(thinking=False))
    prompt = FORMAT.build(encoded.ids, encoded.images)
    assert [(s.length, s.content_hash) for s in prompt.images] == [(17, PICTURE.content_hash)]
    assert len(prompt.ids) == len(encoded.ids) + 16


def test_replies_become_text():
    detokenizer = FORMAT.detokenizer(["stop"])
    ids = [*FORMAT.tokenizer.encode("Hello"), 1]
    assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == "Hello"


def test_images_are_counted_before_they_are_decoded():
    with pytest.raises(PromptError, match="images=65"):
        FORMAT.build([3] * 65, [b"no image"] * 65)
    with pytest.raises(ImageError, match="bytes"):
        FORMAT.build([3], [b"no image"])


@given(
    st.lists(st.one_of(st.integers(4, 639), st.tuples(st.integers(1, 400), st.integers(1, 400))), min_size=1)
)
def test_spans_are_where_the_tokens_were(items):
    images = [planned(*size, b"%d" % i) for i, size in enumerate(i for i in items if isinstance(i, tuple))]
    limits = dataclasses.replace(LIMITS, context_tokens=100_000, max_images=1000)
    short = [3 if isinstance(item, tuple) else item for item in items]
    prompt = build_prompt(short, images, limits)
    assert [s.content_hash for s in prompt.images] == [i.content_hash for i in images]
    assert [s.length for s in prompt.images] == [i.span_length for i in images]
    rest = prompt.ids.copy()
    for span in reversed(prompt.images):
        assert rest[span.start : span.end] == [3] * span.length
        rest[span.start : span.end] = [3]
    assert rest == short
    assert build_prompt(prompt.ids, images, limits) == prompt


@pytest.mark.parametrize(
    ("ids", "images", "named"),
    [
        ([], [], "ids=.*at least one token"),
        ([640], [], r"ids\[0\]=640, must be an integer from 0 to 639"),
        ([5, -1], [], r"ids\[1\]=-1"),
        ([5, 1.0], [], r"ids\[1\]=1\.0"),
        ([True], [], r"ids\[0\]=True"),
        ([5] * 512, [], "length=512, must be below the context of 512"),
        ([5] * 496 + [3], [PICTURE], "length=513"),
        ([3], [], "image tokens=1, must be 0 in a prompt without images"),
        ([5], [PICTURE], "image tokens=0, must be 1, one for each image"),
        ([3, 3, 3], [PICTURE, PICTURE], "image tokens=3, must be 2.*34 positions"),
        ([3] * 16 + [5, 3], [PICTURE], r"ids\[0\].*a run of 17 for image 0"),
        ([5] + [3] * 65, [PICTURE] * 65, "images=65, must be at most 64"),
    ],
)
def test_prompts_that_cannot_run_are_refused(ids, images, named):
    with pytest.raises(PromptError, match=f"prompt: {named}"):
        build_prompt(ids, images, LIMITS)


def test_the_longest_prompt_leaves_room_for_one_token():
    assert len(build_prompt([5] * 511, [], LIMITS).ids) == 511
    assert len(build_prompt([5] * 494 + [3], [PICTURE], LIMITS).ids) == 511


def test_a_text_model_takes_no_image():
    limits = PromptLimits.of(dataclasses.replace(CONFIG, vision=None))
    with pytest.raises(PromptError, match="images=1, must be at most 0"):
        build_prompt([3], [PICTURE], limits)
