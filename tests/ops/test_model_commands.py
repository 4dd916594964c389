"""`cedar model inspect` and `cedar model verify` on the golden checkpoint and on damaged copies of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cedar.model.comparison import TensorResult
from cedar.ops import cli, model_verify
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "v41-tiny"


def test_inspect_shows_plan_page_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model", "inspect", str(GOLDEN)]) == 0
    out = capsys.readouterr().out
    for words in ("106 bytes a token", "3,392 bytes", "makes the candidate pool", "every tensor is there"):
        assert words in out


def test_inspect_of_a_preset_needs_no_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model", "inspect", "flash", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["bytes_per_token"] == 890
    assert record["page_bytes"] == 227_840
    assert record["total"]["nbytes"] == 510_286_023_000
    modes = [layer["mode"] for layer in record["layers"]]
    assert modes.count("full") == 4
    assert modes.count("reindex") == 4
    assert "files" not in record


def test_inspect_json_names_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model", "inspect", str(GOLDEN), "--json", "--page-tokens", "64"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["page_tokens"] == 64
    assert len(record["files"]["fingerprint"]) == 64


def test_inspect_fails_when_a_tensor_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN, checkpoint)
    index = checkpoint / "model.safetensors.index.json"
    record = json.loads(index.read_text())
    del record["weight_map"]["layers.3.attn.wkv.weight"]
    index.write_text(json.dumps(record))
    assert cli.main(["model", "inspect", str(checkpoint)]) == 1
    assert "layers.3.attn.wkv.weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", str(GOLDEN), "--page-tokens", "33"], "33"),
        (["verify", str(GOLDEN), "--expected", "missing.safetensors"], "missing.safetensors"),
        (
            ["verify", str(GOLDEN), "--expected", str(GOLDEN / "config.json"), "--tolerance", "-1"],
            "--tolerance",
        ),
        (["verify", str(GOLDEN), "--expected", str(GOLDEN / "config.json")], "config.json"),
    ],
)
def test_mistakes_are_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.fixture
def expected(tmp_path: Path) -> Path:
    """The prompt's logits of one section: the smallest file worth a run."""
    saved = load_file(GOLDEN / "expected_ced.safetensors")
    path = tmp_path / "expected.safetensors"
    logits, tokens = saved["short/logits"][:3].contiguous(), saved["short/tokens"][:2].contiguous()
    kept = {name: saved[name] for name in ("short/input_ids", "short/full_logits")}
    save_file({**kept, "short/logits": logits, "short/tokens": tokens}, path)
    return path


def test_verify_prints_the_error_of_each_tensor(expected: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model", "verify", str(GOLDEN), "--expected", str(expected)]) == 0
    out = capsys.readouterr().out
    assert "short/full_logits" in out
    assert "3 tensors compared, 3 of them equal bit for bit, 0 over tolerance" in out


def test_verify_json(expected: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model", "verify", str(GOLDEN), "--expected", str(expected), "--json"]) == 0
    tensors = json.loads(capsys.readouterr().out)["tensors"]
    assert {tensor["name"]: tensor["exact"] for tensor in tensors if tensor["passed"] is not None} == {
        "short/full_logits": True,
        "short/logits": True,
        "short/tokens": True,
    }


def test_verify_fails_on_other_weights(
    expected: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN, checkpoint)
    (shard,) = checkpoint.glob("model-*.safetensors")
    content = bytearray(shard.read_bytes())
    header = int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8 : 8 + header])["norm.weight"]["data_offsets"]
    content[8 + header + begin : 8 + header + end : 2] = b"\x55" * ((end - begin) // 2)
    shard.write_bytes(content)
    assert cli.main(["model", "verify", str(checkpoint), "--expected", str(expected)]) == 1
    assert "OVER" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "relative", "exact", "note", "verdict"),
    [
        ("text/logits", 5e-4, False, "", True),
        ("text/logits", 5e-3, False, "", False),
        ("text/layer02.topk", 1e-9, False, "", False),
        ("text/layer02.topk", 0.0, True, "", True),
        ("text/logits", float("nan"), False, "", False),
        ("text/logits", 0.0, False, "compared 3 of 9 values", False),
        ("text/logits", None, False, "shape [2], saved [3]", False),
        ("decode/draft_ids", None, None, "the draft module is not loaded", None),
    ],
)
def test_what_passes(
    name: str, relative: float | None, exact: bool | None, note: str, verdict: bool | None
) -> None:
    result = TensorResult(name=name, shape=(3,), exact=exact, relative_l2=relative, note=note)
    assert model_verify.passed(result, 1e-3) is verdict
