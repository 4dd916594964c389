"""The repository's own rules: packaging is complete, generated files are fresh, nothing leaks in."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from cedar.ops import bootstrap, stubs

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
PACKAGE_FOLDERS = bootstrap.package_folders(ROOT)
MAXIMUM_LINES = 500
GENERATED = ("_pb2.py", "_pb2_grpc.py", "_pb2.pyi")

# Spelled in pieces so that this file does not match itself.
FORBIDDEN = {
    "a path of one machine": re.compile(r"/(?:work|ro" + r"ot|ho" + r"me/\w+|Us" + r"ers/\w+)/\w"),
    "a registry's host name": re.compile(
        r"py" + r"pi\.org|pytorch" + r"\.org|pythonhosted" + r"\.org|np" + r"mjs"
    ),
}
# Where a path or host is the subject: none today.
FORBIDDEN_EXEMPT: set[str] = set()


def repository_files() -> list[Path]:
    """Files git tracks or would add; without git (a source archive), every file outside ignored folders."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=False
    )
    if listing.returncode == 0:
        names = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
        return [path for path in names if path.is_file()]
    ignored = {".venv", "build", "dist", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
    return [p for p in ROOT.rglob("*") if p.is_file() and not ignored & set(p.relative_to(ROOT).parts)]


def python_sources() -> list[Path]:
    return [
        path
        for folder in PACKAGE_FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.name.endswith(GENERATED)
    ]


def test_every_package_folder_is_listed() -> None:
    holders = {path.parent for folder in PACKAGE_FOLDERS for path in (ROOT / folder).rglob("*.py")}
    listed = {ROOT / SETUPTOOLS["package-dir"][name] for name in SETUPTOOLS["packages"]}
    assert listed == holders
    assert set(SETUPTOOLS["package-dir"]) == set(SETUPTOOLS["packages"])


def test_every_package_is_typed_and_its_init_does_no_work() -> None:
    allowed = (ast.Import, ast.ImportFrom, ast.If, ast.FunctionDef)
    for name in SETUPTOOLS["packages"]:
        folder = ROOT / SETUPTOOLS["package-dir"][name]
        assert (folder / "py.typed").exists(), f"{folder.name} has no py.typed"
        init = folder / "__init__.py"
        assert init.exists(), f"{name} has no __init__.py"
        for node in ast.parse(init.read_text()).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            names = (
                isinstance(node, ast.Assign | ast.AnnAssign) and "__all__" in ast.unparse(node).split("=")[0]
            )
            table = isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
            assert docstring or names or table or isinstance(node, allowed), f"{init}:{node.lineno} does work"


def test_committed_stubs_are_fresh() -> None:
    assert stubs.stale(ROOT / "proto") == []


def test_stale_stubs_are_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "cedar" / "v1"
    folder.mkdir(parents=True)
    for path in (ROOT / "proto" / "cedar" / "v1").glob("*.proto"):
        (folder / path.name).write_bytes(path.read_bytes())
    stubs.generate(tmp_path, tmp_path)
    assert stubs.stale(tmp_path) == []
    proto = folder / "store.proto"
    proto.write_text(
        proto.read_text().replace("message StatsRequest {}", "message StatsRequest { bool all = 1; }")
    )
    assert stubs.stale(tmp_path) == ["cedar/v1/store_pb2.py", "cedar/v1/store_pb2.pyi"]


@pytest.mark.parametrize("what", FORBIDDEN)
def test_nothing_of_one_machine_is_written_down(what: str) -> None:
    wrong = []
    for path in repository_files():
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in (".png", ".safetensors") or name in FORBIDDEN_EXEMPT:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if FORBIDDEN[what].search(line):
                wrong.append(f"{name}:{number}: {line.strip()[:100]}")
    assert not wrong, f"{what}:\n" + "\n".join(wrong)


def test_files_stay_readable() -> None:
    counts = {path: len(path.read_text().splitlines()) for path in python_sources()}
    long = [f"{path.relative_to(ROOT)}: {n} lines" for path, n in counts.items() if n > MAXIMUM_LINES]
    assert not long, "\n".join(long)


def test_no_drawer_modules() -> None:
    drawers = [
        path for path in python_sources() if path.stem in ("utils", "util", "common", "helpers", "misc")
    ]
    assert not drawers


def test_every_module_says_what_it_is() -> None:
    silent = [path for path in python_sources() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent


def test_architecture_page_is_a_page() -> None:
    assert len((ROOT / "docs" / "architecture.md").read_text().splitlines()) < 80


def test_golden_checkpoint_is_in_the_clone() -> None:
    golden = ROOT / "tests" / "golden" / "v41-tiny"
    names = {"config.json", "expected.safetensors", "expected_ced.safetensors", "image.png", "tokenizer.json"}
    assert names <= {path.name for path in golden.iterdir()}


def test_tests_for_a_card_are_marked_and_step_aside_without_one() -> None:
    for path in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        marks = [
            ast.unparse(node.value)
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        ]
        assert len(marks) == 1, path.name
        assert "pytest.mark.gpu" in marks[0], path.name
        assert "skipif" in marks[0], path.name
