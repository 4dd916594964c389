"""Accuracy of a checkpoint by task, length and way of serving: `cedar eval`, or this module with `python -m`.

Every number is right answers over questions asked; an answer is right when it is the expected one to the last
character and ends there. Prompts are drawn from a seed that training never used, digits from held-out images.
Needs torch, the tokenizer and Pillow, and no part of a cluster.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cedar.model.network import Network
from cedar.model.storage import Storage
from cedar.model.tokenizer import Tokenizer
from cedar.training.cases import Case, recall_cases, task_cases
from cedar.training.checkpoint_config import END
from cedar.training.eval_options import OptionError, add_arguments, counts
from cedar.training.rows import Row
from cedar.training.serving import Answer, Prompt, built_in_model, load, prompt_of, respond
from cedar.training.tokenization import WordEncoder, encode_conversation, span_measure
from cedar.training.ways import SERVED_WAYS, Way

_DRAFTED = next(way for way in SERVED_WAYS if way.drafting)


@dataclass(frozen=True, eq=False)
class Question:
    """A case as the network sees it: the prompt, and the ids that are right."""

    prompt: Prompt
    wanted: list[int]


def question_of(network: Network, tokenizer: Tokenizer, case: Case) -> Question:
    """The case's last question, the answers before it given."""
    encoded = encode_conversation(
        case.turns, WordEncoder(tokenizer.backend), span_measure(network.config.vision)
    )
    wanted = [*tokenizer.encode(case.turns[-1].answer), END]
    return Question(prompt_of(network, encoded, len(encoded.ids) - len(wanted)), wanted)


def run_case(network: Network, tokenizer: Tokenizer, case: Case, way: Way) -> bool:
    """Whether the network answers the case's last question right."""
    question = question_of(network, tokenizer, case)
    return ask(network, [question], way)[0].ids == question.wanted


def ask(network: Network, questions: Sequence[Question], way: Way, batch: int = 1) -> list[Answer]:
    """An answer to each, `batch` of them decoded together, none longer than the right one."""
    answers: list[Answer] = []
    for start in range(0, len(questions), batch):
        some = questions[start : start + batch]
        answers += respond(network, [q.prompt for q in some], way, [len(q.wanted) for q in some])
    return answers


def evaluate(
    folder: Path,
    lengths: dict[int, int],
    tasks: int,
    ways: Sequence[Way],
    device: str = "cpu",
    batch: int = 8,
    openings: Sequence[int] = (0, 160),
) -> Iterator[Row]:
    """Rows as they become known. `lengths`: recall cases of each length, asked in all `ways`; `tasks`: cases
    of every other task, asked after so many tokens about something else (`openings`, 0 for none), cold, and
    with drafting where a way has it. A way that would find no whole page is left out.
    """
    tokenizer = Tokenizer.load(Storage(str(folder)))
    measure = WordEncoder(tokenizer.backend).measure
    drafting = any(way.drafting for way in ways)
    networks = {
        pool: load(folder, pool=pool, drafting=drafting, device=device) for pool in {way.pool for way in ways}
    }
    few = [*ways[:1], *([_DRAFTED] if drafting else [])]
    jobs: list[tuple[list[Case], Sequence[Way]]] = []
    for opening in openings if tasks else ():
        cases = list(task_cases(tasks, opening, measure))
        jobs += [([c for c in cases if c.task == name], few) for name in dict.fromkeys(c.task for c in cases)]
    jobs += [(list(recall_cases(length, count, measure)), ways) for length, count in lengths.items()]
    for cases, asked in jobs:
        plain: dict[str, list[list[int]]] = {}
        some = networks[asked[0].pool]
        questions = [question_of(some, tokenizer, case) for case in cases]
        page = some.layout.page_tokens
        for way in asked:
            if way.hit and not any(len(q.prompt.ids) * way.hit >= page for q in questions):
                continue  # a hit is whole pages: none of these prompts would have one
            answers = ask(networks[way.pool], questions, way, batch)
            plain[way.name] = [answer.ids for answer in answers]
            yield _row(cases[0].task, way, questions, answers, plain)


def _row(
    task: str,
    way: Way,
    questions: Sequence[Question],
    answers: Sequence[Answer],
    said: dict[str, list[list[int]]],
) -> Row:
    """`said`: what has been answered so far, by way."""
    undrafted = said.get(way.name.removesuffix(", drafting")) if way.drafting else None
    return Row(
        task=task,
        way=way.name,
        right=sum(a.ids == q.wanted for a, q in zip(answers, questions, strict=True)),
        asked=len(answers),
        differing=None
        if undrafted is None
        else sum(a.ids != before for a, before in zip(answers, undrafted, strict=True)),
        steps=sum(a.steps for a in answers),
        told=sum(a.steps + a.accepted for a in answers),
        proposed=sum(a.proposed for a in answers),
        accepted=sum(a.accepted for a in answers),
    )


def run(arguments: argparse.Namespace) -> int:
    """Print a line for every task and way. Raises OptionError."""
    ways = [w for w in SERVED_WAYS if arguments.ways is None or any(t in w.name for t in arguments.ways)]
    if not ways:
        known = "; ".join(way.name for way in SERVED_WAYS)
        raise OptionError(f"--ways {' '.join(arguments.ways)}: no way of that name, there are: {known}")
    folder = arguments.path or built_in_model()
    rows = evaluate(
        folder, counts(arguments.recall), arguments.tasks, ways, arguments.device, arguments.batch
    )
    written = []
    for row in rows:
        written.append(json.dumps(row.record()))
        print(written[-1] if arguments.json else row.line(), flush=True)
        if arguments.output is not None:
            arguments.output.write_text("".join(f"{line}\n" for line in written), "utf-8")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m cedar.training.evaluate", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
