"""The wheel that users install: complete, and working away from the source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from cedar.ops import bootstrap

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = bootstrap.package_folders(ROOT)
DATA_SUFFIXES = (".py", ".pyi", ".proto", ".yaml", ".json", ".jinja", ".safetensors")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the sources, so that no earlier build folder can leak into it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
    finished = subprocess.run(build, capture_output=True, text=True, check=False, env=clean_environment())
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    (built,) = out.glob("*.whl")
    return built


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def expected_members() -> set[str]:
    """Every source and data file of every package, by its name inside the wheel."""
    package_dir = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    folders = {ROOT / folder: name.replace(".", "/") for name, folder in package_dir.items()}
    found = set()
    for top in FOLDERS:
        for path in (ROOT / top).rglob("*"):
            if "__pycache__" in path.parts or not (path.suffix in DATA_SUFFIXES or path.name == "py.typed"):
                continue
            owner = next(parent for parent in path.parents if parent in folders)
            found.add(f"{folders[owner]}/{path.relative_to(owner).as_posix()}")
    return found


def test_wheel_holds_every_source_and_data_file_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    content = {name for name in names if ".dist-info/" not in name}
    assert content == expected_members()
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_installs_and_the_command_runs(wheel: Path, tmp_path: Path) -> None:
    """A fresh environment that sees this one's dependencies, but not its editable install."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--no-deps", "--no-index", "-q", str(wheel)]
    subprocess.run(install, check=True, env=clean_environment())
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*arguments: str) -> str:
        finished = subprocess.run(
            arguments, cwd=tmp_path, capture_output=True, text=True, check=False, env=clean_environment()
        )
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    assert "generate" in run(str(tmp_path / "env" / "bin" / "cedar"), "--help")
    where = run(str(python), "-c", "import cedar.kvstore.layout as m; print(m.__file__)")
    assert str(site) in where
    assert "page_tokens" in run(str(tmp_path / "env" / "bin" / "cedar"), "config", "show", "local-cpu")
