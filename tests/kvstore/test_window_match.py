from __future__ import annotations

from dataclasses import dataclass

import pytest
from cedar.kvstore.keys import chain_keys
from cedar.kvstore.window_match import longest_window, window_digest
from cedar.kvstore.window_tier import WindowName

ROOT = b"\1" * 32
IDS = list(range(50))


@dataclass(frozen=True)
class Span:
    start: int
    length: int
    content_hash: bytes


def record(ids: list[int], tokens: int, images: list[Span] | None = None) -> WindowName:
    images = images or []
    keys = chain_keys(ROOT, ids, images, 16)
    page, digest = window_digest(ROOT, keys, ids, images, 16, tokens)
    return WindowName(page, tokens, digest)


def find(records: list[WindowName], images: list[Span] | None = None, **limits: int) -> int | None:
    images = images or []
    found = longest_window(records, ROOT, chain_keys(ROOT, IDS, images, 16), IDS, images, 16, **limits)
    return None if found is None else found.tokens


def test_the_longest_record_that_matches_wins():
    assert find([record(IDS, 10), record(IDS, 40), record(IDS, 33)]) == 40


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 32, 47, 48, 49])
def test_any_position_can_be_found(tokens: int):
    assert find([record(IDS, tokens)]) == tokens


def test_other_tokens_do_not_match():
    other = [*IDS[:39], 999, *IDS[40:]]
    assert find([record(other, 40), record(other, 39)]) == 39


def test_at_least_one_token_is_left_to_run():
    assert find([record(IDS, 50)]) is None
    assert find([record(IDS, 40), record(IDS, 30)], below=40) == 30


def test_an_image_cut_by_the_record_matches_the_same_image_only():
    image, other = Span(35, 10, b"\2" * 32), Span(35, 10, b"\3" * 32)
    cut = record(IDS, 40, [image])
    assert find([cut], [image]) == 40
    assert find([cut], [other]) is None
    assert find([cut]) is None


def test_nonsense_is_passed_over():
    assert find([WindowName(b"", 0, b""), WindowName(ROOT, 2**31, ROOT), WindowName(ROOT, 5, ROOT)]) is None
