"""The local preset with the random golden checkpoint instead of the built-in model: for tests to the bit."""

from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "v41-tiny"
PAGE_TOKENS = 32
GOLDEN_SETTINGS = (
    f"model.path={GOLDEN}",
    "model.preset=tiny",
    "model.served_name=cedar-tiny",
    f"model.page_tokens={PAGE_TOKENS}",
    "gateway.max_prompt_tokens=512",
    "gateway.max_output_tokens=256",
    "prefill.pages=128",
    "decode.pages=256",
    "decode.drafting=false",
)
