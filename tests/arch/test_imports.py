"""Imports between packages follow one table, wherever in a file they stand.

The walk goes over whole syntax trees, so an import inside a function body or under
``TYPE_CHECKING`` counts, and so does ``importlib.import_module("cedar...")``.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
# Package -> folder: "v1" is "proto/cedar/v1". Packages below others, as cedar.ops.bench, belong to them.
FOLDERS = {
    name.removeprefix("cedar."): folder
    for name, folder in SETUPTOOLS["package-dir"].items()
    if name.count(".") == 1
}

# Package -> what it may import besides itself: another package, or one module of it.
MAY_IMPORT: dict[str, set[str]] = {
    "v1": set(),
    "kernels": set(),
    "model": {"kernels", "kvstore.layout"},
    "kvstore": {"v1"},
    "actors": {"model", "kernels", "kvstore", "v1"},
    "cluster": {"actors", "kvstore", "v1", "configs"},
    "ops": {"v1", "kernels", "model", "kvstore", "actors", "cluster", "configs", "training"},
    "configs": set(),
    "training": {"model", "kernels"},
}

# Third-party packages that only these packages may name.
OWNERS: dict[str, set[str]] = {
    "ray": {"cluster", "ops"},
    "grpc": {"v1", "kvstore", "actors", "cluster", "ops"},
    "grpc_health": {"kvstore", "actors", "cluster", "ops"},
    "grpc_reflection": {"kvstore", "actors", "cluster", "ops"},
    "lmdb": {"kvstore"},
    "torch": {"kernels", "model", "actors", "ops", "training"},
    "triton": {"kernels", "training"},
}

# kernels and model import on a machine that has only these; the rest of what model
# uses (Pillow, Jinja, fsspec) is imported where it is used.
MODULE_LEVEL_THIRD_PARTY = {
    "kernels": {"torch", "triton", "numpy"},
    "model": {"torch", "triton", "numpy", "safetensors", "tokenizers", "pydantic"},
    "configs": set(),
}

STANDARD_LIBRARY_ONLY = ("kvstore/layout.py", "ops/bootstrap.py")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / FOLDERS[package]).rglob("*.py"))


def module_name(package: str, path: Path) -> str:
    inner = path.relative_to(ROOT / FOLDERS[package]).with_suffix("").parts
    return ".".join(("cedar", package, *[part for part in inner if part != "__init__"]))


def imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) for every import; ``from a import b`` yields ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                kept = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*kept, base] if base else kept)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            value = node.args[0].value
            if name in ("import_module", "__import__") and isinstance(value, str):
                yield node.lineno, value


def allowed(package: str, name: str) -> bool:
    """Whether ``package`` may import the dotted ``name``, which starts with ``cedar``."""
    parts = name.split(".")
    if len(parts) < 2 or parts[1] == package:
        return True
    return any(name == f"cedar.{item}" or name.startswith(f"cedar.{item}.") for item in MAY_IMPORT[package])


@pytest.mark.parametrize("package", FOLDERS)
def test_no_arrow_runs_back_up(package: str) -> None:
    wrong = []
    for path in sources(package):
        module = module_name(package, path)
        tree = ast.parse(path.read_text(), str(path))
        for line, name in imported(tree, module, path.name == "__init__.py"):
            top = name.split(".")[0]
            if top == "cedar" and not allowed(package, name):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: cedar.{package} may not import {name}")
            if package not in OWNERS.get(top, {package}):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: cedar.{package} may not import {top}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", MODULE_LEVEL_THIRD_PARTY)
def test_light_packages_import_with_few_dependencies(package: str) -> None:
    permitted = MODULE_LEVEL_THIRD_PARTY[package] | set(sys.stdlib_module_names) | {"cedar"}
    wrong = []
    for path in sources(package):
        tree = ast.parse(path.read_text(), str(path))
        top_level = ast.Module([node for node in tree.body if not is_type_checking(node)], [])
        for node in ast.walk(top_level):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = []
        for line, name in imported(top_level, module_name(package, path), path.name == "__init__.py"):
            if name.split(".")[0] not in permitted:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {name} at module level")
    assert not wrong, "\n".join(wrong)


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@pytest.mark.parametrize("name", STANDARD_LIBRARY_ONLY)
def test_leaf_needs_only_the_standard_library(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text())
    tops = {found.split(".")[0] for _, found in imported(tree, "cedar.leaf", False)}
    assert tops <= set(sys.stdlib_module_names)


def test_every_package_is_in_the_table() -> None:
    assert set(FOLDERS) == set(MAY_IMPORT)


def test_every_folder_with_code_is_a_package() -> None:
    ignored = {"tests", "docs", "build", "dist"}
    tops = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("[a-z]*/**/*.py")} - ignored
    assert tops == {folder.split("/")[0] for folder in FOLDERS.values() if sources_exist(folder)}


def sources_exist(folder: str) -> bool:
    return any((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize(
    ("package", "name", "expected"),
    [
        ("model", "cedar.kernels.norm", True),
        ("model", "cedar.kvstore.layout.PageLayout", True),
        ("model", "cedar.kvstore.layout", True),
        ("model", "cedar.kvstore.keys", False),
        ("model", "cedar.kvstore", False),
        ("kvstore", "cedar.model", False),
        ("cluster", "cedar.model.chat", False),
        ("kernels", "cedar.kernels.fp4", True),
    ],
)
def test_the_rule_itself(package: str, name: str, expected: bool) -> None:
    assert allowed(package, name) is expected


def test_the_walk_sees_function_bodies_and_relative_imports() -> None:
    text = "def f():\n    from ..kvstore import keys\n    import importlib\n    "
    text += "importlib.import_module('cedar.ops')\n"
    names = {name for _, name in imported(ast.parse(text), "cedar.model.network", False)}
    assert {"cedar.kvstore.keys", "importlib", "cedar.ops"} <= names
