from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import pytest
from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.keys import (
    ImagePart,
    chain_keys,
    image_parts,
    page_key,
    root_key,
    split_keys,
    tail_digest,
    tenant_domain,
)
from hypothesis import given
from hypothesis import strategies as st

F = bytes(range(32))
A, B = b"\xaa" * 32, b"\xbb" * 32


@dataclass(frozen=True)
class Span:
    start: int
    length: int
    content_hash: bytes


def test_golden_vectors():
    """These bytes name every page ever stored: a change here is a change of format."""
    root = root_key(b"format", F, tenant_domain(b"secret", "tenant"))
    assert root.hex() == "9fa9e587ffeec8dcfa61dbec70f09046a70e1d0e1f95979e3368df45de73ab92"
    first = page_key(root, [0, 1, 2, 2**32 - 1])
    assert first.hex() == "47cd8ff80062e0d23abda6c10c0e8c9d9c50463aa990cbaa00852fc1d4619526"
    second = page_key(first, [5, 6, 7, 8], [ImagePart(1, 3, A, 4)])
    assert second.hex() == "47cd8ff801496d27e9739ecfe407128d09169a6af90d6e99810b5487166b6f75"
    assert (
        tail_digest(second, [9]).hex() == "72b6360ecfd5ac12f7cce8c6f09ff34b1a3ca64ecf5c08317c26923a02af0de6"
    )


def test_keys_name_their_run_and_place():
    """What placement stands on: sixteen pages share the first bytes and count themselves."""
    root = root_key(b"format", F, b"tenant")
    keys = chain_keys(root, list(range(60 * 4)), [], 4)
    assert [key[4] for key in keys] == [*range(32), *range(16, 32), *range(16, 28)]
    runs = [(0, 4), (4, 8), (8, 12), (12, 16), (16, 32), (32, 48), (48, 60)]
    assert [len({key[:4] for key in keys[start:end]}) for start, end in runs] == [1] * 7
    assert len({key[:4] for key in (root, *keys)}) == 8
    assert len({key[5:] for key in keys}) == 60
    by_hand = root
    for page in range(60):
        by_hand = page_key(by_hand, range(4 * page, 4 * page + 4))
        assert by_hand == keys[page]


def test_every_part_of_the_root_separates():
    roots = {
        root_key(b"format", F, b"tenant"),
        root_key(b"forma", F, b"ttenant"),
        root_key(b"format", F, b"tenan"),
        root_key(b"format", F[::-1], b"tenant"),
        root_key(b"format", F, b""),
        root_key(b"format", F, b"", recipe=b"tenant"),
        root_key(b"format", F, b"tenant", recipe=b"replay"),
        root_key(b"", F, b"formattenant"),
    }
    assert len(roots) == 8


def test_tenants_never_share_a_page_but_each_finds_its_own():
    ids = list(range(64))
    mine, theirs = (root_key(b"f", F, tenant_domain(b"secret", name)) for name in ("mine", "theirs"))
    assert not set(chain_keys(mine, ids, [], 16)) & set(chain_keys(theirs, ids, [], 16))
    again = root_key(b"f", F, tenant_domain(b"secret", "mine"))
    assert chain_keys(again, ids, [], 16) == chain_keys(mine, ids, [], 16)


def test_a_tenant_named_like_a_recipe_stays_apart():
    assert root_key(b"f", F, b"x", recipe=b"y") != root_key(b"f", F, b"y", recipe=b"x")


def test_the_salt_needs_a_secret():
    assert tenant_domain(b"one", "t") != tenant_domain(b"two", "t")
    with pytest.raises(InvalidRequest, match="secret"):
        tenant_domain(b"", "t")


def test_images_of_one_size_separate_by_content_position_and_slot():
    ids = [7] * 16
    keys = {
        page_key(A, ids, images)
        for images in (
            [],
            [ImagePart(2, 5, A, 0)],
            [ImagePart(2, 5, B, 0)],
            [ImagePart(3, 5, A, 0)],
            [ImagePart(2, 6, A, 0)],
            [ImagePart(2, 5, A, 1)],
            [ImagePart(2, 5, A, 0), ImagePart(8, 5, B, 0)],
            [ImagePart(2, 5, B, 0), ImagePart(8, 5, A, 0)],
        )
    }
    assert len(keys) == 8


def test_an_image_that_spans_pages_is_named_by_the_part_in_each():
    parts = image_parts([Span(6, 20, A), Span(40, 2, B)], 8, 16)
    assert parts == (ImagePart(0, 8, A, 2),)
    assert image_parts([Span(6, 20, A)], 24, 32) == (ImagePart(0, 2, A, 18),)
    assert image_parts([Span(6, 20, A)], 26, 32) == ()


def test_a_later_image_changes_only_the_pages_it_touches_and_those_after():
    ids = [1] * 64
    plain = chain_keys(A, ids, [], 16)
    late = chain_keys(A, ids, [Span(40, 4, B)], 16)
    assert plain[:2] == late[:2]
    assert not set(plain[2:]) & set(late[2:])


def test_a_page_is_not_a_tail():
    assert page_key(A, [1, 2]) != tail_digest(A, [1, 2])


@given(
    ids=st.lists(st.integers(0, 2**32 - 1), max_size=80),
    page_tokens=st.integers(1, 20),
    cut=st.integers(0, 80),
)
def test_a_longer_prompt_keeps_the_keys_of_its_prefix(ids: list[int], page_tokens: int, cut: int):
    images = [Span(3, 9, A)] if len(ids) >= 12 else []
    whole = chain_keys(F, ids, images, page_tokens)
    assert len(whole) == len(ids) // page_tokens
    assert len(set(whole)) == len(whole)
    prefix = ids[: cut - cut % page_tokens]
    if not images or len(prefix) >= 12:
        assert chain_keys(F, prefix, images, page_tokens) == whole[: len(prefix) // page_tokens]
    assert chain_keys(F, ids, images, page_tokens, pages=2) == whole[:2]
    parent = F
    for number, key in enumerate(whole):
        start = number * page_tokens
        parts = image_parts(images, start, start + page_tokens)
        parent = page_key(parent, ids[start : start + page_tokens], parts)
        assert parent == key


@given(
    one=st.tuples(st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(0, 2), max_size=2)),
    two=st.tuples(st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(0, 2), max_size=2)),
)
def test_equal_keys_mean_equal_inputs(one: tuple, two: tuple):
    def key(ids: list[int], images: list[int]) -> bytes:
        return page_key(F, ids, [ImagePart(i, 1, A, i) for i in images])

    assert (key(*one) == key(*two)) == (one == two)


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], ["1"]])
def test_ids_out_of_range_are_refused(ids: list):
    with pytest.raises(InvalidRequest, match="ids"):
        page_key(F, ids)


def test_lengths_are_checked():
    with pytest.raises(InvalidRequest, match="parent"):
        page_key(b"short", [1])
    with pytest.raises(InvalidRequest, match="fingerprint"):
        root_key(b"f", b"short", b"")
    with pytest.raises(InvalidRequest, match="content_hash"):
        page_key(F, [1], [ImagePart(0, 1, b"short", 0)])
    with pytest.raises(InvalidRequest, match="page_tokens"):
        chain_keys(F, [1], [], 0)


def test_joined_keys_are_cut_apart():
    assert split_keys(A + B) == [A, B]
    assert split_keys(b"") == []
    with pytest.raises(InvalidRequest, match="multiple of 32"):
        split_keys(A + b"x")
    with pytest.raises(InvalidRequest, match="at most 1"):
        split_keys(A + B, limit=1)


def test_the_hash_input_is_as_documented():
    def field(tag: int, value: bytes) -> bytes:
        return struct.pack("<BI", tag, len(value)) + value

    root = root_key(b"format", F, b"domain", recipe=b"r")
    parts = [(1, b"cedar.root/1"), (2, b"format"), (3, F), (4, b"r"), (5, b"domain")]
    digest = hashlib.sha256(b"".join(field(*part) for part in parts)).digest()
    assert root == digest[:4] + b"\xff" + digest[5:]
    image = struct.pack("<III", 1, 3, 4) + A
    parts = [(1, b"cedar.page/1"), (16, root), (17, struct.pack("<2I", 5, 6)), (18, image)]
    expected = hashlib.sha256(b"".join(field(*part) for part in parts)).digest()
    first = page_key(root, [5, 6], [ImagePart(1, 3, A, 4)])
    assert first == expected[:4] + b"\0" + expected[5:]
    parts = [(1, b"cedar.page/1"), (16, first), (17, struct.pack("<I", 7))]
    expected = hashlib.sha256(b"".join(field(*part) for part in parts)).digest()
    assert page_key(first, [7]) == first[:4] + b"\1" + expected[5:]
