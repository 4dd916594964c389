"""A client inside a network namespace: takes commands on standard input, answers each with a line of JSON."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from cedar.kvstore.cluster_client import ClusterClient
from cedar.kvstore.cluster_config import ClusterClientConfig
from cedar.kvstore.config import ClientConfig
from cedar.kvstore.header import HEADER_BYTES
from cedar.kvstore.member_feed import ServiceFeed


def chains_of_the_tests() -> Any:
    path = Path(__file__).parent.parent / "conftest.py"
    spec = importlib.util.spec_from_file_location("kvstore_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Chains()


async def main(service: str) -> None:
    chains = chains_of_the_tests()
    node = ClientConfig(match_timeout_s=0.5, stall_timeout_s=0.5, put_timeout_s=2.0, stats_timeout_s=0.5)
    client = ClusterClient(
        ServiceFeed(service), fingerprint=chains.fingerprint, config=ClusterClientConfig(node=node)
    )
    await client.match(chains.root(), [])
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, *rest = line.split()
        began = time.monotonic()
        answer: Any = None
        keys = chains.keys(96, salt=int(rest[0])) if rest else []
        if command == "put":
            counts = await client.put_pages(keys, [chains.value(key) for key in keys], tenant=b"t")
            answer = counts.stored + counts.present
        elif command == "match":
            answer = (await client.match(chains.root(), keys)).pages
        elif command == "read":
            answer = 0
            async with aclosing(client.get_pages(keys)) as pages:
                async for index, value in pages:
                    assert bytes(value[HEADER_BYTES:]) == chains.payload(keys[index])
                    answer += 1
        elif command == "members":
            answer = sorted(m.node_id for m in client.feed.current.members)
        elif command == "pages":
            answer = (await client.stats()).get("store_pages", 0)
        print(json.dumps([answer, time.monotonic() - began]), flush=True)
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
