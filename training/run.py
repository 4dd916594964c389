"""`python -m cedar.training.run`: trains the small model, resumably, and exports it.

The folder gets `log.jsonl` (loss, speed, accuracy), `state.pt` (everything needed to go on) and `checkpoint/`
(the published layout).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cedar.training.assets import Assets, make_assets
from cedar.training.draft_training import train_drafts
from cedar.training.export import export_checkpoint
from cedar.training.settings import full_settings, polish_settings, smoke_settings
from cedar.training.trainer import Trainer


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m cedar.training.run", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the log, the state and the checkpoint go")
    parser.add_argument("--seconds", type=float, default=420.0, help="time of the backbone's training")
    parser.add_argument("--steps", type=int, default=0, help="progress by steps instead of time")
    parser.add_argument("--log-every", type=int, default=None, help="steps between log lines")
    parser.add_argument(
        "--draft-seconds", type=float, default=60.0, help="time of the draft stages' training"
    )
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a batch")
    parser.add_argument("--lr", type=float, default=None, help="learning rate of matrices")
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--smoke", type=int, default=0, metavar="STEPS", help="a narrow model for a few steps"
    )
    parser.add_argument(
        "--polish", type=int, default=0, metavar="STEPS", help="short batches after a full run"
    )
    parser.add_argument(
        "--start", type=Path, nargs="*", default=[], help="weights to start from (state dicts)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the folder's state.pt")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Train, draft, export."""
    arguments = build_parser().parse_args(argv)
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    assets = make_assets(narrow=bool(arguments.smoke), seed=0)
    if arguments.smoke:
        settings = smoke_settings(arguments.smoke)
    elif arguments.polish:
        settings = polish_settings(arguments.polish)
    else:
        settings = full_settings(arguments.seconds, arguments.tokens, arguments.workers)
    changes: dict[str, Any] = {"seed": arguments.seed}
    for name in ("lr", "log_every"):
        if getattr(arguments, name) is not None:
            changes[name] = getattr(arguments, name)
    if arguments.steps:
        changes["steps"] = arguments.steps
    settings = settings.with_changes(**changes)
    device = torch.device(arguments.device)
    trainer = Trainer(assets, settings, folder, device, resume=arguments.resume)
    weights = {k: v for path in arguments.start for k, v in torch.load(path, weights_only=True).items()}
    if weights:
        trainer.network.load_state_dict(weights)
    trainer.run()
    save_checkpoint(folder, assets, trainer, None)
    drafts = train_drafts(
        trainer,
        seconds=arguments.draft_seconds,
        steps=arguments.smoke,
    )
    size = save_checkpoint(folder, assets, trainer, drafts)
    trainer.log({"exported_bytes": size, "time": time.time()})
    print(json.dumps({"exported_bytes": size, **trainer.final_scores}))
    return 0


def save_checkpoint(
    folder: Path, assets: Assets, trainer: Trainer, drafts: dict[str, torch.Tensor] | None
) -> int:
    """Export backbone and draft stages; untrained stages where there are none yet."""
    weights = dict(trainer.network.state_dict())
    weights |= drafts if drafts is not None else trainer.untrained_drafts()
    return export_checkpoint(folder / "checkpoint", assets.published, weights, assets.tokenizer)


if __name__ == "__main__":
    raise SystemExit(main())
