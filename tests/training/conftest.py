"""Assets of the narrow model; and Triton's interpreter where there is no GPU, set before a kernel module is
imported.
"""

from __future__ import annotations

import os

import pytest
import torch
from cedar.training.assets import Assets, make_assets

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def narrow() -> Assets:
    return make_assets(narrow=True, seed=0)
