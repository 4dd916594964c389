"""``cedar generate``: send one prompt, stream the answer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..exits import CommandError, Exit

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from cedar.v1.generation_pb2 import GenerateRequest

EXAMPLES = """\
examples:
  cedar generate "Say hello"
  cedar generate "What is in the picture?" --image cat.png
  cedar generate "And its colour?" --conversation talk.json     # run it again for the next turn
  git diff | cedar generate - --system "Review this change" --max-tokens 400
  cedar generate "Say hello" --json | jq -j 'select(.text).text'

The answer goes to standard output as it comes; a line about where the prompt's tokens came from goes to
standard error. Ctrl-C cancels the request in the cluster before the command ends.
"""


def add(verbs: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    parser = verbs.add_parser(
        "generate",
        help="send a prompt, with images if you like, and stream the answer",
        description="Send one prompt to a running cluster and print the tokens as they come.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", help="the text; - reads it from standard input")
    parser.add_argument(
        "--image", action="append", default=[], type=Path, metavar="FILE", help="may be repeated"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message, for a new conversation")
    parser.add_argument(
        "--conversation", type=Path, metavar="FILE", help="continue, and save, this conversation"
    )
    parser.add_argument(
        "--raw", action="store_true", help="no chat template: the model continues the text itself"
    )
    parser.add_argument("--thinking", action="store_true", help="let the model think before it answers")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=whole(1), metavar="N", help="default: the cluster's")
    sampling.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="0 takes the likeliest token"
    )
    sampling.add_argument("--top-p", type=float, default=0.0, metavar="P", help="0 or 1: off")
    sampling.add_argument("--top-k", type=whole(0), default=0, metavar="K", help="0: off")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0: off")
    sampling.add_argument(
        "--seed",
        type=whole(0, bits=64),
        metavar="N",
        help="same seed, same answer (default: a random one)",
    )
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be repeated")
    sampling.add_argument(
        "--logprobs", type=whole(0), default=0, metavar="N", help="alternatives a token; with --json"
    )
    output = parser.add_argument_group("output and connection")
    output.add_argument(
        "--json", action="store_true", help="one JSON object a line: each token, then the summary"
    )
    output.add_argument("--quiet", action="store_true", help="no summary line")
    output.add_argument("--timeout", type=above_zero, metavar="SECONDS", help="give up after this long")
    add_target(output)
    parser.set_defaults(run=run)


def add_target(group: argparse._ArgumentGroup) -> None:
    """Add the options that say which cluster is meant."""
    group.add_argument("--address", metavar="HOST:PORT", help="a gateway, here or elsewhere")
    group.add_argument("--cluster", metavar="NAME", help="a cluster started here (default: the only one)")
    add_key(group)


def add_key(group: argparse._ArgumentGroup) -> None:
    """Add the option that says who asks."""
    group.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file whose first line is the API key"
    )


def run(arguments: argparse.Namespace) -> Exit:
    """Run the verb."""
    import asyncio

    from ..conversation_file import ConversationFile
    from ..generation import Reply, stream_reply

    request_text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    images = [_read_image(path) for path in arguments.image]
    conversation = ConversationFile.open(arguments.conversation)
    if arguments.raw and (arguments.conversation or arguments.system):
        raise CommandError("--raw sends bare text; it goes with neither --conversation nor --system")
    if arguments.system and conversation.turns:
        raise CommandError(
            f"--system: {arguments.conversation} has begun already; a system message comes first"
        )
    if arguments.system:
        conversation.add("system", arguments.system)
    conversation.add("user", *images, request_text)
    request = build_request(arguments, conversation, request_text, images)
    reply: Reply = asyncio.run(
        stream_reply(request, find_address(arguments), sys.stdout, as_json=arguments.json,
                     timeout_s=arguments.timeout, api_key=read_key(arguments.api_key_file))
    )  # fmt: skip
    if not arguments.quiet and not arguments.json:
        print(reply.summary(), file=sys.stderr)
    if reply.failed:
        return Exit.FAILED
    conversation.add("assistant", reply.text)
    conversation.save()
    return Exit.OK


def build_request(
    arguments: argparse.Namespace, conversation: object, text: str, images: list[bytes]
) -> GenerateRequest:
    """The request that the arguments describe."""
    import random

    from cedar.v1.common_pb2 import SamplingParams
    from cedar.v1.generation_pb2 import GenerateRequest

    from ..conversation_file import ConversationFile
    from ..generation import conversation_message

    seed = arguments.seed if arguments.seed is not None else random.getrandbits(63)
    sampling = SamplingParams(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        seed=seed,
        max_tokens=arguments.max_tokens or 0,
        stop=arguments.stop,
        logprobs=arguments.logprobs,
    )
    if arguments.raw:
        return GenerateRequest(text=text, images=images, sampling=sampling)
    assert isinstance(conversation, ConversationFile)
    message = conversation_message(conversation.turns, thinking=arguments.thinking)
    return GenerateRequest(conversation=message, sampling=sampling)


def find_address(arguments: argparse.Namespace) -> str:
    """Address of the gateway that the options name, or of the one cluster that runs here."""
    if arguments.address:
        return str(arguments.address)
    from cedar.cluster.state_file import find

    return find(arguments.cluster).address


def read_key(path: Path | None) -> str | None:
    """The API key in ``path``; ``CEDAR_API_KEY`` when no file is named."""
    import os

    if path is None:
        return os.environ.get("CEDAR_API_KEY") or None
    lines = path.read_text("utf-8").split("\n")
    if not lines[0].strip():
        raise CommandError(f"{path}: its first line is empty; the API key goes there")
    return lines[0].strip()


def _read_image(path: Path) -> bytes:
    content = path.read_bytes()
    if not content:
        raise CommandError(f"{path}: the file is empty")
    return content


def whole(least: int, bits: int = 32) -> Callable[[str], int]:
    """An argument's type: a whole number from ``least`` that a message's field of ``bits`` bits can hold."""

    def integer(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        if value >= 1 << bits:
            raise argparse.ArgumentTypeError(f"{value} does not fit into {bits} bits")
        return value

    return integer


def above_zero(text: str) -> float:
    """An argument's type: a duration."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{value:g} is not above 0")
    return value
