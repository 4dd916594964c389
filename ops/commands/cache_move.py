"""``cedar cache export``, ``import`` and ``warm``: pages out of a store, and into another one."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from ..exits import CommandError, Exit
from ..screen import emit_json, size
from .cache_nodes import Target, open_cold
from .cache_progress import PageProgress

if TYPE_CHECKING:
    from cedar.kvstore.packs import Page

AT_ONCE = 4


def run_export(arguments: argparse.Namespace) -> Exit:
    """Copy pages into a file or into the cold tier."""
    target = Target.find(arguments)
    if bool(arguments.file) == bool(arguments.cold):
        raise CommandError("say where to: a FILE, or --cold URL")
    if arguments.file and arguments.file.exists() and not arguments.force:
        raise CommandError(f"{arguments.file} exists; --force replaces it")
    with PageProgress("export", quiet=arguments.json) as progress:
        wrote = asyncio.run(_export(target, arguments, progress))
    record = {"pages": progress.pages, "bytes": progress.bytes, **wrote}
    if arguments.json:
        emit_json(record, sys.stdout)
    else:
        where = arguments.file or f"{arguments.cold} ({len(wrote['packs'])} packs)"
        print(f"{progress.pages} pages, {size(progress.bytes)}, verified, to {where} at {progress.rate}")
    if not progress.pages:
        print("cedar: nothing matches; nothing was exported", file=sys.stderr)
        return Exit.FAILED
    return Exit.OK


async def _export(target: Target, arguments: argparse.Namespace, progress: PageProgress) -> dict[str, Any]:
    from cedar.v1 import admin_pb2

    request = admin_pb2.ExportRequest(segment=arguments.segment or 0)
    if arguments.prompt is not None:
        request.page_keys = await _prompt_keys(target, arguments)
    else:
        request.tenant = await target.tenant(arguments)

    async def pages() -> AsyncIterator[Page]:
        async with target.admin() as admin:
            async for total, page in admin.export(request):
                progress.advance(len(page.value), total)
                yield page

    if arguments.cold:
        return {"packs": await _to_cold(arguments.cold, pages())}
    from cedar.kvstore import pack_file

    with pack_file.writing(arguments.file) as writer:
        async for page in pages():
            writer.add(page)
        if not writer.values:
            raise CommandError("nothing matches; nothing was exported", Exit.FAILED)
    return {"file": str(arguments.file)}


async def _to_cold(url: str, pages: AsyncIterator[Page]) -> list[str]:
    """Hand pages to the archiving thread, a few ahead of it."""
    tier = open_cold(url)
    loop = asyncio.get_running_loop()
    ready: asyncio.Queue[Page | None] = asyncio.Queue(64)

    def arriving() -> Iterator[Page]:
        while (page := asyncio.run_coroutine_threadsafe(ready.get(), loop).result()) is not None:
            yield page

    writing = asyncio.ensure_future(asyncio.to_thread(lambda: [m.pack for m in tier.archive(arriving())]))
    try:
        async for page in pages:
            feeding = asyncio.ensure_future(ready.put(page))
            await asyncio.wait({feeding, writing}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                feeding.cancel()
                break
    finally:
        if not writing.done():
            await ready.put(None)
    return await writing


async def _prompt_keys(target: Target, arguments: argparse.Namespace) -> bytes:
    from ..cache_explain import explain

    arguments.image, arguments.conversation, arguments.system = [], None, None
    arguments.thinking = False
    found = await explain(target, arguments)
    held = [bytes.fromhex(page.key) for page in found.pages[: found.hit_pages]]
    if not held:
        raise CommandError(f"nothing of this prompt is held: {found.summary}", Exit.FAILED)
    return b"".join(held)


def run_import(arguments: argparse.Namespace) -> Exit:
    """Put the pages of a file into the store."""
    target = Target.find(arguments)
    from cedar.kvstore import pack_file
    from cedar.kvstore.errors import CorruptValue
    from cedar.kvstore.packs import Page

    with pack_file.reading(arguments.file) as pack:
        damaged = 0

        def pages() -> Iterator[tuple[int, Page]]:
            nonlocal damaged
            for packed, value in pack.read():
                if isinstance(value, CorruptValue):
                    damaged += 1
                    continue
                yield len(pack.pages), Page(packed.key, value, packed.page_index, packed.tenant, packed.age_s)

        with PageProgress("import", quiet=arguments.json) as progress:
            counts = asyncio.run(put_all(target, pages(), progress))
    return _report(arguments, "imported", counts | {"damaged": damaged}, progress)


def run_warm(arguments: argparse.Namespace) -> Exit:
    """Fill a store from the cold tier, or by running prompts through the cluster once."""
    if bool(arguments.cold) == bool(arguments.prompts):
        raise CommandError("say what with: --cold URL, or --prompts FILE")
    if arguments.prompts:
        from ..cache_warm import run_prompts

        return run_prompts(arguments)
    target = Target.find(arguments)
    tier = open_cold(arguments.cold)
    domain = asyncio.run(target.tenant(arguments))
    manifests = [m for m in tier.manifests() if domain in (b"", m.tenant)]
    total = sum(manifest.values for manifest in manifests)
    seen: set[bytes] = set()

    def pages() -> Iterator[tuple[int, Page]]:
        for manifest in reversed(manifests):  # the youngest first
            for page in tier.restore(manifest, skip=seen):
                seen.add(page.key)
                yield total, page

    with PageProgress("warm", quiet=arguments.json) as progress:
        counts = asyncio.run(put_all(target, pages(), progress))
    lost = tier.counters["damaged"] + tier.counters["lost"]
    return _report(arguments, "restored", counts | {"damaged": lost}, progress)


async def put_all(
    target: Target, pages: Iterator[tuple[int, Page]], progress: PageProgress
) -> dict[str, int]:
    """Put pages, neighbours of a chain together, a few calls at a time; refused ones are tried once more."""
    client = await target.putter()
    counts = {"stored": 0, "present": 0, "conflicts": 0, "refused": 0}
    busy = asyncio.Semaphore(AT_ONCE)

    async def put(run: list[Page], total: int) -> None:
        async with busy:
            keys, values = [page.key for page in run], [bytes(page.value) for page in run]
            first, tenant = run[0].page_index, run[0].tenant
            outcome = await client.put_pages(keys, values, first_page=first, tenant=tenant)
            if outcome.refused:
                await asyncio.sleep(max(outcome.retry_after_s, 0.5))
                outcome = await client.put_pages(keys, values, first_page=first, tenant=tenant)
            for name in counts:
                counts[name] += getattr(outcome, name)
            for value in values:
                progress.advance(len(value), total)

    running: set[asyncio.Task[None]] = set()
    try:
        for total, run in runs(pages):
            running.add(asyncio.create_task(put(run, total)))
            while len(running) >= 2 * AT_ONCE:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        for task in running:
            await task
    finally:
        for task in running:
            task.cancel()
        await client.close()
    return counts


def runs(pages: Iterator[tuple[int, Page]], *, most: int = 32) -> Iterator[tuple[int, list[Page]]]:
    """Consecutive pages of one tenant and size, ``most`` at a time, as one put takes them."""
    run: list[Page] = []
    total = 0
    for total, page in pages:
        last = run[-1] if run else None
        if last is not None and (
            len(run) == most
            or page.tenant != last.tenant
            or page.page_index != last.page_index + 1
            or len(page.value) != len(last.value)
        ):
            yield total, run
            run = []
        run.append(page)
    if run:
        yield total, run


def _report(arguments: argparse.Namespace, verb: str, counts: dict[str, int], progress: PageProgress) -> Exit:
    if arguments.json:
        emit_json({"pages": progress.pages, "bytes": progress.bytes, **counts}, sys.stdout)
    else:
        rest = ", ".join(f"{value} {name}" for name, value in counts.items() if value and name != "stored")
        text = f"{verb} {counts['stored']} pages, {size(progress.bytes)} read at {progress.rate}"
        print(text + (f"; {rest}" if rest else ""))
    return Exit.FAILED if counts["refused"] or counts["damaged"] else Exit.OK
