"""``cedar eval``: ask a checkpoint, or a running cluster, questions whose answers are right or wrong."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..exits import CommandError, Exit
from .generate import above_zero, add_key, read_key, whole

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from cedar.training.cases import Case

EXAMPLES = """\
examples:
  cedar eval                                     the built-in small model, every task and way of serving
  cedar eval FOLDER --recall 8192:4 --tasks 0    four recalls in 8,192 tokens, every way of serving
  cedar eval --ways drafting --device cuda       drafting only, on a GPU
  cedar eval --endpoint 127.0.0.1:50051 --concurrency 4
                                                 the same questions through a cluster's public API

A cluster is asked through its API, greedily; accuracy stands beside the time to the first token and between
tokens. Exit code 1 when a question got no answer; wrong answers are a result.
"""


def add(verbs: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the verb to the command line."""
    from cedar.training.eval_options import add_arguments

    parser = verbs.add_parser(
        "eval",
        help="accuracy of a small model by task, length and way of serving, here or through a cluster",
        description="Ask generated questions (recall, lists, sums, pictures) in this process and count right "
        "answers: cold, after prefix hits with and without window record, with and without replay, pool and "
        "drafting. Or ask a running cluster.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    group = parser.add_argument_group("a running cluster")
    group.add_argument("--endpoint", metavar="HOST:PORT", help="ask this gateway instead of a checkpoint")
    group.add_argument(
        "--concurrency", type=whole(1), default=1, metavar="N", help="questions under way at once (1)"
    )
    group.add_argument("--seed", type=whole(0), metavar="N", help="other questions than the usual ones")
    group.add_argument("--timeout", type=above_zero, metavar="SECONDS", help="give a question up after this")
    add_key(group)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Exit:
    """Run the verb."""
    try:
        if arguments.endpoint:
            return ask_endpoint(arguments)
        from cedar.training.evaluate import run as ask_checkpoint

        return Exit(ask_checkpoint(arguments))
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] != "sklearn":
            raise
        raise CommandError(
            "handwritten digits come with scikit-learn: pip install 'cedar-epd[train]', or ask --tasks 0"
        ) from None


def ask_endpoint(arguments: argparse.Namespace) -> Exit:
    """Ask the gateway at ``arguments.endpoint``; print a table or JSON lines."""
    import asyncio

    from cedar.cluster.client import GenerationClient

    from ..endpoint_eval import Outcome, as_table, put_questions, summaries, tell_progress
    from ..screen import console, emit_json

    cases = choose_cases(arguments)

    async def ask() -> list[Outcome]:
        async with GenerationClient(arguments.endpoint, read_key(arguments.api_key_file)) as client:
            return await put_questions(
                client,
                cases,
                concurrency=arguments.concurrency,
                timeout_s=arguments.timeout,
                on_outcome=tell_progress(len(cases)),
            )

    outcomes = asyncio.run(ask())
    summed = list(summaries(outcomes))
    if arguments.json:
        for summary in summed:
            emit_json(summary.record(), sys.stdout)
    else:
        console().print(as_table(summed, f"{arguments.endpoint}, {arguments.concurrency} at once"))
    if arguments.output is not None:
        with Path(arguments.output).open("w", encoding="utf-8") as file:
            for summary in summed:
                emit_json(summary.record(), file)
    failed = [outcome.error for outcome in outcomes if outcome.error]
    for error in sorted(set(failed)):
        print(f"{failed.count(error)} without an answer: {error}", file=sys.stderr)
    return Exit.FAILED if failed else Exit.OK


def choose_cases(arguments: argparse.Namespace) -> list[Case]:
    """The questions that the options ask for, cut to length with the checkpoint's tokenizer."""
    from cedar.model.storage import Storage
    from cedar.model.tokenizer import Tokenizer
    from cedar.training.cases import SEED, recall_cases, task_cases
    from cedar.training.eval_options import counts
    from cedar.training.serving import built_in_model
    from cedar.training.tokenization import WordEncoder

    seed = SEED if arguments.seed is None else arguments.seed
    folder = arguments.path or built_in_model()
    measure = WordEncoder(Tokenizer.load(Storage(str(folder))).backend).measure
    cases: list[Case] = []
    for opening in (0, 160) if arguments.tasks else ():
        cases += task_cases(arguments.tasks, opening, measure, seed)
    for length, count in counts(arguments.recall).items():
        cases += recall_cases(length, count, measure, seed)
    return cases
