"""Assets of the narrow model."""

from __future__ import annotations

import pytest
from cedar.training.assets import Assets, make_assets


@pytest.fixture(scope="session")
def narrow() -> Assets:
    return make_assets(narrow=True, seed=0)
