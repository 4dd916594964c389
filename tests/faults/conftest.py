"""Stores in processes of their own; whatever a test starts, its fixture ends."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import store_child, store_shim
from .store_shim import FailingDisk


class Died(Exception):
    """The process ended instead of answering; ``status`` as ``subprocess`` gives it."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"status {status}: {said[-1000:]}")
        self.status = status


class TierProcess:
    """A tier in another process: ``tier("put", salt, pages)``."""

    def __init__(self, directory: Path, environment: dict[str, str], settings: dict[str, Any]) -> None:
        command = [sys.executable, store_child.__file__, str(directory), json.dumps(settings)]
        path = ":".join(part for part in sys.path if part)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        self.pid = self._process.pid

    def ready(self) -> TierProcess:
        """Wait until the tier is open. Died."""
        self._answer()
        return self

    def __call__(self, name: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        return self._answer()

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Whatever it does, it ends."""
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], 60)
        assert readable, "no answer within a minute"
        line = self._process.stdout.readline()
        if not line:
            assert self._process.stderr is not None
            status = self._process.wait()
            raise Died(status, self._process.stderr.read())
        return json.loads(line)


TierStarter = Callable[..., TierProcess]


@pytest.fixture
def start_tier(tmp_path: Path) -> Iterator[TierStarter]:
    """Start a tier in ``directory`` (default: always the same), on a ``disk`` that may fail."""
    started: list[TierProcess] = []

    def start(
        *, directory: Path | None = None, disk: FailingDisk | None = None, **settings: Any
    ) -> TierProcess:
        tier = TierProcess(directory or tmp_path / "store", disk.environment if disk else {}, settings)
        started.append(tier)
        return tier.ready()

    yield start
    for tier in started:
        tier.end()


@pytest.fixture(scope="session")
def shim_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return store_shim.build(tmp_path_factory.mktemp("shim"))
    except store_shim.NoCompiler as error:
        pytest.skip(f"a failing disk cannot be made: {error}")


@pytest.fixture
def disk(shim_library: Path, tmp_path: Path) -> FailingDisk:
    """The disk under the directory of ``start_tier``."""
    return FailingDisk(shim_library, tmp_path / "orders", tmp_path / "store")
