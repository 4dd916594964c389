from __future__ import annotations

import subprocess
import sys

import pytest
from cedar.kvstore.header import HEADER_BYTES
from cedar.kvstore.layout import LayoutError, PageLayout, Plane
from hypothesis import given
from hypothesis import strategies as st

FLASH = PageLayout.build(
    sources=[(2, 2), (8, 2), (14, 2), (20, 1)], head_dim=512, index_head_dim=128, page_tokens=256
)
TINY = PageLayout.build(sources=[(2, 2), (4, 2), (6, 1)], head_dim=64, index_head_dim=32, page_tokens=32)


def test_flash_page_is_890_bytes_a_token_and_227840_bytes():
    assert FLASH.bytes_per_token == 890.0
    assert FLASH.page_bytes == 227_840


def test_flash_page_with_header_fills_56_database_pages():
    overflow_header = 16
    assert -(-(FLASH.page_bytes + HEADER_BYTES + overflow_header) // 4096) == 56
    assert HEADER_BYTES <= 96


def test_planes_of_flash_lie_where_the_format_says():
    first = FLASH.source(2)
    assert first.planes == (
        Plane(0, 256, 128),
        Plane(32_768, 32, 128),
        Plane(36_864, 64, 128),
        Plane(45_056, 4, 128),
    )
    assert FLASH.source(20).main_payload == Plane(136_704, 256, 256)
    assert FLASH.source(20).index_scales.end == FLASH.page_bytes


def test_tiny_page():
    assert TINY.page_bytes == 3392
    assert TINY.bytes_per_token == 106.0


def test_format_id_is_pinned():
    assert TINY.format_id == (
        b"cedar-page/1;le,lo-nibble,e2m1/e4m3x16,e2m1/e8m0x32;t32;"
        b"L2/2:0+32*16,512+4*16,576+16*16,832+1*16;"
        b"L4/2:848+32*16,1360+4*16,1424+16*16,1680+1*16;"
        b"L6/1:1696+32*32,2720+4*32,2848+16*32,3360+1*32;b3392"
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"head_dim": 40}, "head_dim"),
        ({"index_head_dim": 48}, "index_head_dim"),
        ({"page_tokens": 33}, "page_tokens"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"page_tokens": 1 << 20}, "page_tokens"),
        ({"sources": []}, "sources"),
        ({"sources": [(4, 2), (2, 2)]}, "sources"),
        ({"sources": [(4, 0)]}, "ratio"),
        ({"head_dim": 1 << 20, "page_tokens": 1 << 15}, "page_bytes"),
    ],
)
def test_impossible_layouts_name_the_field(change: dict, field: str):
    good: dict = {"sources": [(2, 2), (6, 1)], "head_dim": 64, "index_head_dim": 32, "page_tokens": 32}
    with pytest.raises(LayoutError, match=field) as caught:
        PageLayout.build(**good | change)
    assert caught.value.field == field


def test_a_layer_that_stores_nothing_is_named():
    with pytest.raises(KeyError, match="layer 3"):
        TINY.source(3)


@given(
    layers=st.sets(st.integers(0, 80), min_size=1, max_size=6),
    ratios=st.lists(st.sampled_from([1, 2, 4]), min_size=6, max_size=6),
    head=st.integers(1, 40),
    index=st.integers(1, 8),
    groups=st.integers(1, 64),
)
def test_planes_are_aligned_disjoint_and_cover_the_page(
    layers: set, ratios: list, head: int, index: int, groups: int
):
    sources = list(zip(sorted(layers), ratios, strict=False))
    layout = PageLayout.build(
        sources=sources, head_dim=16 * head, index_head_dim=32 * index, page_tokens=4 * groups
    )
    end = 0
    for source in layout.sources:
        for plane in source.planes:
            assert plane.offset % 16 == 0
            assert 0 <= plane.offset - end < 16
            end = plane.end
    assert 0 <= layout.page_bytes - end < 16
    expected = sum((8 * head + head + 16 * index + index) / ratio for _, ratio in sources)
    assert layout.bytes_per_token == pytest.approx(expected)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 8))
def test_different_formats_have_different_ids(head: int, index: int, groups: int):
    def build(h: int, i: int, g: int) -> bytes:
        return PageLayout.build(
            sources=[(1, 2)], head_dim=16 * h, index_head_dim=32 * i, page_tokens=2 * g
        ).format_id

    assert (build(head, index, groups) == build(2, 2, 4)) == ((head, index, groups) == (2, 2, 4))


def test_layout_needs_the_standard_library_alone():
    code = (
        "import sys; import cedar.kvstore.layout; print([m for m in sys.modules if m.startswith('cedar.')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "['cedar.kvstore', 'cedar.kvstore.layout']"
