"""Triton's interpreter stands in for a GPU: set before any test module of any folder imports a kernel, and
only where there is none.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
