"""Regenerates the committed protobuf stubs: ``python -m cedar.ops.stubs [--check]``.

Messages of every ``.proto`` get ``_pb2.py`` and ``_pb2.pyi``. Only the public
``generation.proto`` gets gRPC service stubs: the internal services carry frames
with identity serializers, which ``cedar.kvstore.rpc`` builds from descriptors.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib import resources
from pathlib import Path

PUBLIC_SERVICES = ("generation",)
PROTO_PACKAGE = Path("cedar") / "v1"


def proto_root() -> Path:
    """Folder that holds ``cedar/v1/*.proto`` in a source checkout."""
    return Path(__file__).resolve().parent.parent / "proto"


def generate(root: Path, out: Path) -> list[Path]:
    """Write stubs for every proto below ``root`` into ``out``; return their paths relative to ``out``."""
    from grpc_tools import protoc

    includes = str(resources.files("grpc_tools") / "_proto")
    protos = sorted((root / PROTO_PACKAGE).glob("*.proto"))
    base = ["protoc", f"-I{root}", f"-I{includes}", f"--python_out={out}", f"--pyi_out={out}"]
    written: list[Path] = []
    for proto in protos:
        command = list(base)
        names = [f"{proto.stem}_pb2.py", f"{proto.stem}_pb2.pyi"]
        if proto.stem in PUBLIC_SERVICES:
            command.append(f"--grpc_python_out={out}")
            names.append(f"{proto.stem}_pb2_grpc.py")
        if protoc.main([*command, str(proto)]) != 0:
            raise RuntimeError(f"protoc failed on {proto.name}")
        written += [PROTO_PACKAGE / name for name in names]
    return written


def stale(root: Path) -> list[str]:
    """Names of committed stubs that differ from what the protos generate now."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(root, Path(scratch))
        return [
            str(name)
            for name in fresh
            if not (root / name).exists() or (root / name).read_bytes() != (Path(scratch) / name).read_bytes()
        ]


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m cedar.ops.stubs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a stub is stale")
    arguments = parser.parse_args(argv)
    root = proto_root()
    if arguments.check:
        names = stale(root)
        for name in names:
            print(f"stale: proto/{name}; run python -m cedar.ops.stubs")
        return 1 if names else 0
    for written in generate(root, root):
        print(f"wrote proto/{written}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
