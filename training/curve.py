"""`python -m cedar.training.curve LOG OUT`: a run's `log.jsonl` as a picture (SVG).

Written without a plot library. Left axis: loss of answer tokens, logarithmic. Right axis: share of answer
tokens that are right. Phases are shaded.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 360, 60, 60, 34, 44
_LOSSES: Final = (0.001, 0.01, 0.1, 1.0, 10.0)
_SHARES: Final = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Read the log, write the picture."""
    parser = argparse.ArgumentParser(prog="python -m cedar.training.curve", description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args(argv)
    lines = [json.loads(line) for line in arguments.log.read_text().splitlines()]
    arguments.out.write_text(picture(lines))
    return 0


def picture(lines: Iterable[dict[str, Any]]) -> str:
    """The SVG of a log's lines. Raises ValueError for a log without steps."""
    lines = list(lines)
    steps = [line for line in lines if "answer_loss" in line]
    if not steps:
        raise ValueError("log has no line with answer_loss, must have some")
    phases = [(line["elapsed_s"], line["phase"]) for line in lines if "phase" in line and "loss" not in line]
    end = steps[-1]["elapsed_s"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for number, (begun, name) in enumerate(phases):
        until = phases[number + 1][0] if number + 1 < len(phases) else end
        left, right = _x(begun, end), _x(until, end)
        shade = "#f3f3f3" if number % 2 else "#e8eef5"
        parts.append(
            f'<rect x="{left:.1f}" y="{_TOP}" width="{right - left:.1f}" height="{_HEIGHT - _TOP - _BOTTOM}" '
            f'fill="{shade}"/>'
        )
        parts.append(_text((left + right) / 2, _TOP - 8, name, "middle", size=10))
    for loss in _LOSSES:
        parts.append(_text(_LEFT - 6, _loss_y(loss) + 4, f"{loss:g}", "end", "#b03020"))
    for share in _SHARES:
        parts.append(_text(_WIDTH - _RIGHT + 6, _share_y(share) + 4, f"{share:.0%}", "start", "#2050a0"))
    every = next(step for step in (10, 25, 50, 100, 250, 500, 1000) if end / step <= 12)
    for second in range(0, int(end) + 1, every):
        parts.append(_text(_x(second, end), _HEIGHT - _BOTTOM + 18, f"{second} s", "middle"))
    loss_points = ((_x(s["elapsed_s"], end), _loss_y(s["answer_loss"])) for s in steps)
    share_points = ((_x(s["elapsed_s"], end), _share_y(s["answer_accuracy"])) for s in steps)
    parts += [_line(loss_points, "#b03020"), _line(share_points, "#2050a0")]
    parts.append(_text(_LEFT, _HEIGHT - 8, "loss of answer tokens", "start", "#b03020"))
    parts.append(_text(_WIDTH - _RIGHT, _HEIGHT - 8, "answer tokens right", "end", "#2050a0"))
    return "\n".join([*parts, "</svg>", ""])


def _x(seconds: float, end: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * seconds / end


def _loss_y(loss: float) -> float:
    low, high = math.log(_LOSSES[0]), math.log(_LOSSES[-1])
    place = (math.log(min(max(loss, _LOSSES[0]), _LOSSES[-1])) - low) / (high - low)
    return _HEIGHT - _BOTTOM - place * (_HEIGHT - _TOP - _BOTTOM)


def _share_y(share: float) -> float:
    place = (max(share, _SHARES[0]) - _SHARES[0]) / (_SHARES[-1] - _SHARES[0])
    return _HEIGHT - _BOTTOM - place * (_HEIGHT - _TOP - _BOTTOM)


def _line(points: Iterable[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}" font-size="{size}">{text}</text>'


if __name__ == "__main__":
    raise SystemExit(main())
