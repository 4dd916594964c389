"""`python -m cedar.training.run`: trains the small model, resumably, and exports it.

The folder gets `log.jsonl` (loss, speed, accuracy), `state.pt` (everything needed to go on) and `checkpoint/`
(the published layout).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from cedar.training.assets import Assets, make_assets
from cedar.training.draft_training import train_drafts
from cedar.training.export import export_checkpoint
from cedar.training.settings import full_settings, smoke_settings
from cedar.training.trainer import Trainer

STEPS = 2600


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m cedar.training.run", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the log, the state and the checkpoint go")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the backbone's training")
    parser.add_argument("--log-every", type=int, default=None, help="steps between log lines")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a batch")
    parser.add_argument("--lr", type=float, default=None, help="learning rate of matrices")
    parser.add_argument("--vision-lr", type=float, default=None, help="of the vision tower's matrices")
    parser.add_argument("--mixer-lr", type=float, default=None, help="of mHC projections, routers and gates")
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--smoke", type=int, default=0, metavar="STEPS", help="a narrow model for a few steps"
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
    else:
        settings = full_settings(arguments.steps, arguments.tokens, arguments.workers)
    settings = settings.with_changes(seed=arguments.seed)
    if arguments.log_every is not None:
        settings = settings.with_changes(log_every=arguments.log_every)
    for option, rate in (("lr", "matrices"), ("vision_lr", "vision"), ("mixer_lr", "mixers")):
        if (value := getattr(arguments, option)) is not None:
            settings = settings.with_changes(rates=replace(settings.rates, **{rate: value}))
    device = torch.device(arguments.device)
    trainer = Trainer(assets, settings, folder, device, resume=arguments.resume)
    trainer.run()
    save_checkpoint(folder, assets, trainer, None)
    if settings.final_singles:
        trainer.evaluate(dict(settings.final_lengths), settings.final_singles, seed=11)
    drafts = train_drafts(trainer, settings.draft_steps)
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
