"""What a product promises the launch after it."""

from __future__ import annotations

import pytest
import torch
from cedar.kernels.prepared import CODES, Prepared
from cedar.model import dense
from cedar.model.dense import Dense, Rows


@pytest.mark.parametrize(
    ("waits_first", "order", "prepared", "promised"),
    [
        (True, CODES, True, True),
        (True, CODES, False, False),  # the product quantises, and lets the next launch go early
        (True, None, False, True),
        (False, CODES, True, False),
    ],
)
def test_nothing_is_read_early_behind_a_product_that_quantises(
    waits_first: bool, order: int | None, prepared: bool, promised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "settles", lambda rows, weight: waits_first)
    monkeypatch.setattr(dense, "order_for", lambda rows, weight: order)
    weight = torch.zeros(64, 32).to(torch.float8_e4m3fn)
    product = Dense(weight, torch.full((2, 1), 127, dtype=torch.uint8))
    x = torch.zeros(5, 32, dtype=torch.bfloat16)
    assert product.settles(Rows(x, (Prepared(x, CODES),) if prepared else ())) is promised
