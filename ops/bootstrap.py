"""Makes ``.venv`` and installs Cedar into it: ``python3 -I ops/bootstrap.py [--extra test]``.

``make demo`` and ``make test`` run this first. Standard library only, since nothing is
installed yet. One stamp in the environment says what it holds: a digest of the project file
and constraints, and one of the list of source files. The strict editable mode links file by
file, so a file that was added or removed needs a fresh link step (seconds, no downloads).

Which torch: where no GPU is found, ``constraints-cpu.txt`` narrows torch to a range whose CPU
build pip can find; with a GPU nothing narrows it and pip takes its default, the CUDA build.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import venv
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

SOURCE_SUFFIXES = (".py", ".pyi", ".proto", ".yaml", ".json")
STAMP = "cedar-install.json"
LOG = "install.log"
LOG_TAIL_LINES = 25


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """What an environment holds. Equal stamps mean that nothing needs to be done."""

    root: str
    requirements: str
    files: str
    torch: str
    extras: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Stamp | None:
        """Return the stamp at ``path``, or None when there is none or it cannot be read."""
        try:
            record = json.loads(path.read_text())
            return cls(
                root=record["root"],
                requirements=record["requirements"],
                files=record["files"],
                torch=record["torch"],
                extras=tuple(record["extras"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Write the stamp; the last step of an installation."""
        path.write_text(json.dumps(self.__dict__, indent=1) + "\n")


def digest(parts: Iterable[bytes]) -> str:
    """Hex digest over length-prefixed ``parts``."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()[:32]


def package_folders(root: Path) -> list[str]:
    """Folders at the root that hold packages, as the project file lists them, sorted."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    return sorted({folder.split("/")[0] for folder in project["tool"]["setuptools"]["package-dir"].values()})


def source_files(root: Path) -> list[str]:
    """Paths of every file that the packages hold, relative to ``root``, sorted."""
    found: list[str] = []
    for folder in package_folders(root):
        for path in (root / folder).rglob("*"):
            if path.suffix in SOURCE_SUFFIXES or path.name == "py.typed":
                found.append(path.relative_to(root).as_posix())
    return sorted(found)


def torch_build(requested: str) -> str:
    """``cpu`` or ``cuda``; ``auto`` asks ``nvidia-smi`` whether this machine has a GPU."""
    if requested != "auto":
        return requested
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "cpu"
    listing = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return "cuda" if listing.returncode == 0 and "GPU" in listing.stdout else "cpu"


def constraint_files(root: Path, build: str) -> list[Path]:
    """Constraint files that apply to ``build``."""
    files = [root / "constraints.txt"]
    if build == "cpu":
        files.append(root / "constraints-cpu.txt")
    return [path for path in files if path.exists()]


def wanted(root: Path, build: str, extras: tuple[str, ...]) -> Stamp:
    """Return the stamp that an up-to-date environment would carry."""
    inputs = [root / "pyproject.toml", *constraint_files(root, build)]
    return Stamp(
        root=str(root),
        requirements=digest(path.read_bytes() for path in inputs),
        files=digest(name.encode() for name in source_files(root)),
        torch=build,
        extras=extras,
    )


def steps_needed(have: Stamp | None, want: Stamp) -> str:
    """Return ``nothing``, ``links`` (only the file list changed), ``all`` or ``afresh`` (a new environment).

    An environment that was moved has the old place in its scripts, and pip would find the other build
    of torch good enough, so these two need a new one.

    Extras only accumulate: an environment made for the tests also serves the demo.
    """
    if have is not None and (have.root, have.torch) != (want.root, want.torch):
        return "afresh"
    if have is None or have.requirements != want.requirements:
        return "all"
    if not set(want.extras) <= set(have.extras):
        return "all"
    return "nothing" if have.files == want.files else "links"


class Progress:
    """Says what goes on and for how long: a moving line on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._start = time.monotonic()
        self._terminal = sys.stdout.isatty()
        self._text = ""
        self._done = threading.Event()
        print(f"{title} ...", flush=True)
        self._clock = threading.Thread(target=self._tick, daemon=True)
        self._clock.start()

    def note(self, text: str) -> None:
        """Set the current activity."""
        self._text = text

    def done(self) -> None:
        """Close with the time taken."""
        self.close()
        print(f"{self._title}: done in {time.monotonic() - self._start:.0f} s", flush=True)

    def close(self) -> None:
        """Stop the clock and clear its line."""
        self._done.set()
        self._clock.join()
        if self._terminal:
            print("\r\x1b[K", end="", flush=True)

    def _tick(self) -> None:
        while not self._done.wait(0.5 if self._terminal else 10.0):
            line = f"  {time.monotonic() - self._start:4.0f} s  {self._text}"
            if self._terminal:
                print(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
            else:
                print(line, flush=True)


def pip(python: Path, log: Path, arguments: list[str], progress: Progress) -> None:
    """Run pip with its output in ``log``; on failure print the end of that log and exit."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PIP_NO_INPUT": "1"}
    lines: list[str] = []
    with (
        log.open("a") as sink,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            text=True, env=environment,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            sink.write(line)
            lines.append(line)
            words = line.split()
            if words and words[0] == "Installing":
                progress.note(f"unpacking {len(words) - 3} packages")
            elif words and words[0] in ("Collecting", "Downloading", "Processing", "Building"):
                progress.note(f"{words[0].lower()} {words[1].rsplit('/', 1)[-1]}")
    if process.returncode != 0:
        progress.close()
        print("".join(lines[-LOG_TAIL_LINES:]), file=sys.stderr)
        sys.exit(f"pip failed; everything it said is in {log}")


def create_environment(directory: Path) -> Path:
    """Create a virtual environment unless it is there; return its interpreter."""
    python = directory / "bin" / "python"
    if (directory / "bin" / "pip").exists():
        return python
    try:
        venv.create(directory, with_pip=True, clear=directory.exists())
    except subprocess.CalledProcessError:
        sys.exit(f"could not create {directory}: Python's venv and pip are needed (on Debian: python3-venv)")
    return python


def install(root: Path, directory: Path, build: str, extras: tuple[str, ...]) -> None:
    """Bring ``directory`` up to date with the source tree at ``root``."""
    stamp_path = directory / STAMP
    have = Stamp.read(stamp_path) if (directory / "bin" / "python").exists() else None
    want = wanted(root, build, extras)
    step = steps_needed(have, want)
    if step == "nothing":
        return
    stamp_path.unlink(missing_ok=True)
    doing = (
        "Linking new source files" if step == "links" else f"Installing into {directory.name}, {build} torch"
    )
    progress = Progress(doing)
    progress.note("creating the environment")
    if step == "afresh":
        shutil.rmtree(directory)
        have = None
    python = create_environment(directory)
    log = directory / LOG
    log.unlink(missing_ok=True)
    constraints = [item for path in constraint_files(root, build) for item in ("-c", str(path))]
    for links in (root / "build").glob("__editable__.*"):
        shutil.rmtree(links)  # of an earlier version or file list
    every_extra = tuple(sorted({*extras, *(have.extras if have else ())}))
    target = f"{root}[{','.join(every_extra)}]" if every_extra else str(root)
    editable = ["--no-build-isolation", "--config-settings", "editable_mode=strict", "-e"]
    if step == "links":
        pip(python, log, ["--no-deps", *editable, str(root)], progress)
    else:
        pip(python, log, [*constraints, "setuptools>=77", "wheel"], progress)
        pip(python, log, [*constraints, *editable, target], progress)
    replace(want, extras=every_extra).write(stamp_path)
    progress.done()


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module docstring."""
    parser = argparse.ArgumentParser(prog="ops/bootstrap.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venv", default=".venv", help="environment to bring up to date (default: .venv)")
    parser.add_argument("--extra", action="append", default=[], help="optional dependency set, such as test")
    parser.add_argument("--torch", choices=("auto", "cpu", "cuda"), default="auto", help="default: what fits")
    arguments = parser.parse_args(argv)
    root = Path(__file__).resolve().parent.parent
    with (root / "pyproject.toml").open() as project:
        fcntl.flock(project, fcntl.LOCK_EX)  # one installation at a time in a tree
        try:
            install(root, root / arguments.venv, torch_build(arguments.torch), tuple(sorted(arguments.extra)))
        except KeyboardInterrupt:
            print("\ninterrupted; the next make starts over where it has to", file=sys.stderr)
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
