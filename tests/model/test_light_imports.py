"""A process that only builds prompts pays for no tensor library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import sys
from pathlib import Path
from cedar.model.checkpoint import Checkpoint
from cedar.model.fingerprint import fingerprint
from cedar.model.prompt import PromptFormat
from cedar.model.sampling_params import SamplingParams
from cedar.model.schedule import page_layout

folder = Path(sys.argv[1])
form = PromptFormat.open(str(folder))
prompt = form.build(form.encode_text("hello", images=1), [(folder / "image.png").read_bytes()])
assert prompt.images and SamplingParams(temperature=0.5)
fingerprint(Checkpoint.open(str(folder)), page_layout(form.config))
assert "torch" not in sys.modules, "torch"
"""


def test_prompts_and_fingerprints_need_no_torch(golden: Path) -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT, str(golden)], check=True, timeout=60)
