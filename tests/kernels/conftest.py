"""Triton's interpreter stands in for a GPU: set before any kernel module is imported, and only where there
is none.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
