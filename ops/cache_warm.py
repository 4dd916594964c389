"""Runs prompts through a cluster once, so that their pages are in the store before anyone asks for them."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from .exits import CommandError, Exit
from .screen import emit_json

AT_ONCE = 4


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """One prompt a line: its text, or JSON with ``text`` (bare), or ``user`` and maybe ``system``."""
    prompts: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            prompts.append({"user": line})
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise CommandError(f"{path}, line {number}: {error}") from None
        known = {"text", "user", "system"}
        if not isinstance(record, dict) or not record or set(record) - known:
            raise CommandError(f"{path}, line {number}: an object with {', '.join(sorted(known))} is needed")
        prompts.append(record)
    if not prompts:
        raise CommandError(f"{path}: no prompt in it")
    return prompts


def run_prompts(arguments: argparse.Namespace) -> Exit:
    """Send every prompt for one token; say what of them was there already."""
    from .commands.generate import find_address, read_key

    prompts = read_prompts(arguments.prompts)
    arguments.address = None
    address = find_address(arguments)
    totals = asyncio.run(_send(address, read_key(arguments.api_key_file), prompts, quiet=arguments.json))
    if arguments.json:
        emit_json(totals, sys.stdout)
    else:
        done = totals["prompts"] - totals["failed"]
        print(
            f"{done} prompts run, {totals['failed']} failed: {totals['prompt_tokens']} tokens, "
            f"{totals['cached_tokens']} of them were there already, {totals['pages_stored']} pages stored"
        )
    return Exit.FAILED if totals["failed"] else Exit.OK


async def _send(
    address: str, api_key: str | None, prompts: list[dict[str, Any]], *, quiet: bool
) -> dict[str, int]:
    import grpc
    from cedar.cluster.client import GenerationClient
    from cedar.v1 import common_pb2, generation_pb2

    from .conversation_file import Turn
    from .generation import conversation_message

    names = ("failed", "prompt_tokens", "cached_tokens", "pages_stored")
    totals = {"prompts": len(prompts), **dict.fromkeys(names, 0)}
    busy = asyncio.Semaphore(AT_ONCE)
    told_s = time.monotonic()
    done = 0

    async def one(client: GenerationClient, prompt: dict[str, Any]) -> None:
        nonlocal told_s, done
        request = generation_pb2.GenerateRequest(sampling=common_pb2.SamplingParams(max_tokens=1))
        if "text" in prompt:
            request.text = prompt["text"]
        else:
            turns = [Turn(role, (prompt[role],)) for role in ("system", "user") if role in prompt]
            request.conversation.CopyFrom(conversation_message(turns, thinking=False))
        finished = None
        async with busy:
            try:
                async for event in client.generate(request):
                    if event.WhichOneof("event") == "finished":
                        finished = event.finished
            except grpc.RpcError as error:
                detail = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
                print(f"cedar: a prompt failed: {detail}", file=sys.stderr)
        done += 1
        if finished is None:
            totals["failed"] += 1
        else:
            sources = finished.sources
            totals["prompt_tokens"] += sources.prompt_tokens
            totals["cached_tokens"] += sources.prompt_tokens - sources.computed_tokens
            totals["pages_stored"] += finished.traffic.pages_stored
        if not quiet and time.monotonic() - told_s > 5.0:
            told_s = time.monotonic()
            print(f"  warm: {done} of {len(prompts)} prompts", file=sys.stderr, flush=True)

    async with GenerationClient(address, api_key) as client:
        await asyncio.gather(*(one(client, prompt) for prompt in prompts))
    return totals
