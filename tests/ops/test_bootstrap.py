"""The installer decides rightly what to do; pip itself is not run here."""

from __future__ import annotations

from pathlib import Path

import pytest
from cedar.ops import bootstrap


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[tool.setuptools.package-dir]\n"cedar.kernels" = "kernels"\n')
    (tmp_path / "constraints.txt").write_text("numpy==1\n")
    (tmp_path / "constraints-cpu.txt").write_text("torch<2\n")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "fp4.py").write_text("")
    return tmp_path


def test_an_up_to_date_environment_needs_nothing(tree: Path) -> None:
    stamp = bootstrap.wanted(tree, "cpu", ("test",))
    assert bootstrap.steps_needed(stamp, stamp) == "nothing"


def test_edited_sources_need_nothing_but_new_files_need_links(tree: Path) -> None:
    before = bootstrap.wanted(tree, "cpu", ())
    (tree / "kernels" / "fp4.py").write_text("x = 1\n")
    assert bootstrap.steps_needed(before, bootstrap.wanted(tree, "cpu", ())) == "nothing"
    (tree / "kernels" / "fp8.py").write_text("")
    assert bootstrap.steps_needed(before, bootstrap.wanted(tree, "cpu", ())) == "links"


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "constraints-cpu.txt"])
def test_changed_requirements_need_everything(tree: Path, name: str) -> None:
    before = bootstrap.wanted(tree, "cpu", ())
    (tree / name).write_text((tree / name).read_text() + "\n# changed\n")
    assert bootstrap.steps_needed(before, bootstrap.wanted(tree, "cpu", ())) == "all"


def test_folders_come_from_the_project_file() -> None:
    root = Path(__file__).resolve().parents[2]
    assert {"proto", "kernels", "ops"} <= set(bootstrap.package_folders(root))


def test_extras_only_accumulate(tree: Path) -> None:
    tests, demo = bootstrap.wanted(tree, "cpu", ("test",)), bootstrap.wanted(tree, "cpu", ())
    assert bootstrap.steps_needed(tests, demo) == "nothing"
    assert bootstrap.steps_needed(demo, tests) == "all"


def test_cpu_constraints_apply_to_the_cpu_build_alone(tree: Path) -> None:
    assert [path.name for path in bootstrap.constraint_files(tree, "cpu")] == [
        "constraints.txt",
        "constraints-cpu.txt",
    ]
    assert [path.name for path in bootstrap.constraint_files(tree, "cuda")] == ["constraints.txt"]
    cpu, cuda = bootstrap.wanted(tree, "cpu", ()), bootstrap.wanted(tree, "cuda", ())
    assert bootstrap.steps_needed(cpu, cuda) == "afresh"


def test_a_moved_tree_needs_a_new_environment(tree: Path) -> None:
    before = bootstrap.wanted(tree, "cpu", ())
    moved = tree.rename(tree.with_name("moved"))
    assert bootstrap.steps_needed(before, bootstrap.wanted(moved, "cpu", ())) == "afresh"


@pytest.mark.parametrize(
    ("script", "build"),
    [
        (None, "cpu"),
        ("#!/bin/sh\necho 'GPU 0: Some GPU (UUID: GPU-1)'\n", "cuda"),
        ("#!/bin/sh\necho 'no devices were found'\n", "cpu"),
        ("#!/bin/sh\necho 'driver not loaded'; exit 9\n", "cpu"),
    ],
)
def test_the_gpu_is_found_by_asking_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, build: str
) -> None:
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if script else str(tmp_path))
    assert bootstrap.torch_build("auto") == build
    assert bootstrap.torch_build("cuda") == "cuda"


def test_a_damaged_stamp_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "stamp.json"
    assert bootstrap.Stamp.read(path) is None
    path.write_text('{"requirements": 1')
    assert bootstrap.Stamp.read(path) is None
    path.write_text('{"requirements": "a"}')
    assert bootstrap.Stamp.read(path) is None
    stamp = bootstrap.Stamp(root="r", requirements="a", files="b", torch="cpu", extras=("test",))
    stamp.write(path)
    assert bootstrap.Stamp.read(path) == stamp
