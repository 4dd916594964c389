"""Where a prompt's prefix stands in the store, page by page: what ``cedar cache explain`` shows."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cedar.kvstore.admin_client import PageHolder
    from cedar.v1 import admin_pb2

    from .commands.cache_nodes import Target


@dataclass(frozen=True)
class PageVerdict:
    """One page. ``outcome``: hit; miss with why; or ``unreachable``, held behind a page that is not."""

    page: int
    first_token: int
    last_token: int
    key: str
    outcome: str
    tier: str = ""
    nodes: tuple[str, ...] = ()
    age_s: float | None = None
    idle_s: float | None = None
    ttl_left_s: float | None = None
    tenant: str = ""


@dataclass(frozen=True)
class Explanation:
    """A whole prompt. ``window_tokens``: the position that a window record restores exactly, 0 if none."""

    prompt_tokens: int
    page_tokens: int
    hit_pages: int
    cached_tokens: int
    window_tokens: int
    window_node: str
    pages: tuple[PageVerdict, ...]
    summary: str


async def explain(target: Target, arguments: argparse.Namespace) -> Explanation:
    """Tokenize the prompt as the gateway would, name its pages, and ask every node for them."""
    from cedar.actors.prompts import PromptTools
    from cedar.kvstore.keys import chain_keys, root_key
    from cedar.v1 import generation_pb2

    from .conversation_file import ConversationFile
    from .generation import conversation_message

    model = target.config.model
    tools = PromptTools.load(model.path, model.page_tokens)
    images = [path.read_bytes() for path in arguments.image]
    if arguments.raw:
        request = generation_pb2.GenerateRequest(text=arguments.prompt, images=images)
    else:
        conversation = ConversationFile.open(arguments.conversation)
        if arguments.system:
            conversation.add("system", arguments.system)
        conversation.add("user", *images, arguments.prompt)
        message = conversation_message(conversation.turns, thinking=arguments.thinking)
        request = generation_pb2.GenerateRequest(conversation=message)
    prompt = tools.prepare(request)
    domain = await target.tenant(arguments, default=True)
    root = root_key(tools.format_id, tools.fingerprint, domain)
    keys = chain_keys(root, prompt.ids, prompt.images, tools.page_tokens)
    async with target.admin() as admin:
        holders, windows = await admin.explain(root, keys)
    return judge(prompt.ids, prompt.images, root, keys, tools.page_tokens, holders, windows)


def judge(
    ids: Sequence[int],
    images: Sequence[Any],
    root: bytes,
    keys: Sequence[bytes],
    page_tokens: int,
    holders: Sequence[Sequence[PageHolder]],
    windows: Sequence[tuple[str, admin_pb2.WindowState]],
) -> Explanation:
    """From what each node says to one verdict a page. Pure."""
    from cedar.kvstore.window_match import longest_window

    verdicts: list[PageVerdict] = []
    hit_pages = 0
    for page, (key, nodes) in enumerate(zip(keys, holders, strict=True)):
        verdict = _verdict(page, key, nodes, page_tokens, reachable=hit_pages == page)
        verdicts.append(verdict)
        hit_pages += verdict.outcome == "hit"
    known = keys[:hit_pages]
    record = longest_window([state for _, state in windows], root, known, ids, images, page_tokens)
    window_tokens = 0 if record is None else record.tokens
    window_node = next((address for address, state in windows if state is record), "")
    # At least one token is always run, so a prompt that is all whole pages keeps its last page to compute.
    cached = max(min(hit_pages * page_tokens, len(ids) - 1), window_tokens)
    first_miss = next((v for v in verdicts if v.outcome != "hit"), None)
    summary = f"{hit_pages} of {len(keys)} whole pages hit: {cached} of {len(ids)} tokens from the cache"
    if not keys:
        summary = f"this prompt of {len(ids)} tokens is shorter than a page of {page_tokens}, so it has none"
    if window_tokens:
        summary += f"; window state of token {window_tokens} on {window_node}, no replay"
    elif hit_pages:
        summary += "; no window state, so it is rebuilt by replay"
    if first_miss is not None:
        summary += f"; page {first_miss.page} ends it: {first_miss.outcome.removeprefix('miss: ')}"
    return Explanation(
        len(ids), page_tokens, hit_pages, cached, window_tokens, window_node, tuple(verdicts), summary
    )


def _verdict(
    page: int, key: bytes, nodes: Sequence[PageHolder], page_tokens: int, *, reachable: bool
) -> PageVerdict:
    place = (page, page * page_tokens, (page + 1) * page_tokens - 1, key.hex())
    held = [node for node in nodes if node.state.held]
    if not held:
        why = "not held"
        if any(node.state.damaged for node in nodes):
            why = "damaged, quarantined"
        elif any(node.state.expired for node in nodes):
            why = "expired"
        return PageVerdict(*place, outcome=f"miss: {why}")
    freshest = min(held, key=lambda node: node.state.idle_s).state
    return PageVerdict(
        *place,
        outcome="hit" if reachable else "unreachable: an earlier page is missing",
        tier="ssd",
        nodes=tuple(node.address for node in held),
        age_s=freshest.age_s,
        idle_s=freshest.idle_s,
        ttl_left_s=freshest.ttl_left_s,
        tenant=freshest.tenant.hex(),
    )
