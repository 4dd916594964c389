"""Reads of a file that memory cannot hold: the tier against pread, in a process with a third of the memory.

Each sample is a process of its own: pages that a process has mapped cannot be dropped from the cache while it
lives. Where control groups may be made, the child runs in one whose memory is a third of the file; elsewhere
it only starts with nothing of the file in the cache, and the report says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from cedar.kvstore.config import GIB, SsdConfig
from cedar.kvstore.put import PutItem
from cedar.kvstore.segment import VALUES_FILE
from cedar.kvstore.ssd_tier import SsdTier

from .store_measure import (
    VALUE_BYTES,
    Figure,
    bench_keys,
    bench_value,
    drop_cached,
    figure,
    interleaved,
    read_from_disk_bytes,
)

CHAIN_PAGES = 64
FRAME_PAGES = 4
ANNOUNCED_PAGES = 8
Runs = list[list[tuple[int, int]]]
_CGROUP = Path("/sys/fs/cgroup/memory")


def cold_reads(
    directory: Path, *, file_gib: float = 1.125, reads: int = 512, repeats: int = 7
) -> list[Figure]:
    """Random pages and whole chains, from a segment three times as large as the memory given."""
    chains = round(file_gib * GIB / VALUE_BYTES / CHAIN_PAGES)
    _fill(directory, chains)
    memory_bytes = int(file_gib * GIB / 3)
    samples: dict[str, list[dict[str, float]]] = {}
    with _limited_group(memory_bytes) as group:

        def sample(name: str) -> float:
            drop_cached(directory / "plain")
            for path in directory.glob(f"tier/segments/*/{VALUES_FILE}"):
                drop_cached(path)
            found = _child(directory, name, chains, reads, len(samples.get(name, ())), group)
            samples.setdefault(name, []).append(found)
            return found["seconds"]

        names = ("tier random", "plain random", "tier chain", "plain chain")
        results = interleaved({name: partial(sample, name) for name in names}, repeats)
    limited = "" if group is None else f"in {memory_bytes >> 20} MiB of memory"
    note = limited or "page cache dropped before each sample, memory not limited"
    figures = []
    for shape, predicted in (("random", 0.95), ("chain", 0.95)):
        tier, plain = results[f"tier {shape}"], results[f"plain {shape}"]
        rates = {
            f"{who}_MB_s": VALUE_BYTES * reads / sorted(times)[len(times) // 2] / 1e6
            for who, times in (("tier", tier), ("plain", plain))
        }
        what = "single pages" if shape == "random" else f"chains of {CHAIN_PAGES}"
        figures.append(
            figure(
                f"cold get, {what}: tier with checksum / pread of a plain file",
                [p / t for t, p in zip(tier, plain, strict=True)],
                predicted=predicted,
                limit=0.8,
                note=note,
                details=rates,
            )
        )
        figures.append(
            figure(
                f"cold get, {what}: bytes read from disk / bytes served",
                [s["amplification"] for s in samples[f"tier {shape}"]],
                predicted=1.04,
                limit=1.2,
                at_least=False,
                note=note,
                details={"plain": samples[f"plain {shape}"][0]["amplification"]},
            )
        )
    return figures


def _fill(directory: Path, chains: int) -> None:
    """The same pages in a tier of one segment and in a plain file, chain after chain."""
    tier = _tier(directory)
    with open(directory / "plain", "wb") as plain:
        for chain in range(chains):
            keys = bench_keys(CHAIN_PAGES, salt=chain)
            values = [bench_value(key) for key in keys]
            tier.put([PutItem(k, v, i) for i, (k, v) in enumerate(zip(keys, values, strict=True))]).result()
            plain.writelines(values)
    tier.close()


@contextlib.contextmanager
def _limited_group(memory_bytes: int) -> Iterator[Path | None]:
    """A control group with that much memory, page cache included; None where none can be made."""
    group = _CGROUP / f"cedar-bench-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(memory_bytes))
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        yield None
        return
    try:
        yield group
    finally:
        with contextlib.suppress(OSError):
            (group / "memory.force_empty").write_text("0")
        group.rmdir()


def _child(
    directory: Path, name: str, chains: int, reads: int, seed: int, group: Path | None
) -> dict[str, float]:
    command = [sys.executable, "-m", "cedar.ops.bench.store_cold_reads", str(directory), name]
    command += [str(chains), str(reads), str(seed), str(group or "")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    """One sample, in a process of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("name")
    for number in ("chains", "reads", "seed"):
        parser.add_argument(number, type=int)
    parser.add_argument("group")
    arguments = parser.parse_args()
    if arguments.group:
        (Path(arguments.group) / "cgroup.procs").write_text(str(os.getpid()))
    who, _, shape = arguments.name.partition(" ")
    rng = random.Random(arguments.seed)
    if shape == "random":
        chains = arguments.chains
        runs = [[(rng.randrange(chains), rng.randrange(CHAIN_PAGES))] for _ in range(arguments.reads)]
    else:
        chosen = rng.sample(range(arguments.chains), arguments.reads // CHAIN_PAGES)
        runs = [[(chain, page) for page in range(CHAIN_PAGES)] for chain in chosen]
    read = (_tier_reader if who == "tier" else _plain_reader)(arguments.directory, runs)
    before = read_from_disk_bytes()
    started_s = time.perf_counter()
    read()
    seconds = time.perf_counter() - started_s
    amplification = (read_from_disk_bytes() - before) / (VALUE_BYTES * sum(map(len, runs)))
    print(json.dumps({"seconds": seconds, "amplification": amplification}))


def _tier(directory: Path) -> SsdTier:
    """A tier that keeps all in one segment."""
    config = SsdConfig(directory=directory / "tier", capacity_bytes=16 * GIB, segment_bytes=4 * GIB)
    return SsdTier(config, background=False)


def _tier_reader(directory: Path, runs: Runs) -> Callable[[], None]:
    tier = _tier(directory)
    chains = {chain: bench_keys(CHAIN_PAGES, salt=chain) for run in runs for chain, _ in run}
    wanted = [[chains[chain][page] for chain, page in run] for run in runs]

    frame = [memoryview(bytearray(VALUE_BYTES)) for _ in range(FRAME_PAGES)]

    def read() -> None:
        for keys in wanted:
            tier.announce(keys[:ANNOUNCED_PAGES])
            for position in range(0, len(keys), FRAME_PAGES):
                if position % ANNOUNCED_PAGES == 0:
                    tier.announce(keys[position + ANNOUNCED_PAGES : position + 2 * ANNOUNCED_PAGES])
                pages = keys[position : position + FRAME_PAGES]
                found = tier.read_into(pages, FRAME_PAGES * VALUE_BYTES, lambda count, size: frame)
                assert found is not None
                assert found.count == len(pages)

    return read


def _plain_reader(directory: Path, runs: Runs) -> Callable[[], None]:
    fd = os.open(directory / "plain", os.O_RDONLY)

    def read() -> None:
        for run in runs:
            for chain, page in run:
                offset = VALUE_BYTES * (chain * CHAIN_PAGES + page)
                assert len(os.pread(fd, VALUE_BYTES, offset)) == VALUE_BYTES

    return read


if __name__ == "__main__":
    main()
