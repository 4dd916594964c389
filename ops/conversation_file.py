"""A conversation kept in a JSON file between calls of ``cedar generate --conversation FILE``.

The file is a list of turns, ``{"role": ..., "content": [{"text": ...} | {"image": base64}]}``. Images are
kept inside, so that the second turn sends the same bytes as the first and finds its pages.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from .exits import CommandError

ROLES = ("system", "user", "assistant")
Part = str | bytes


@dataclass(frozen=True)
class Turn:
    """One message: text parts as ``str``, encoded images as ``bytes``, in order."""

    role: str
    content: tuple[Part, ...]


@dataclass
class ConversationFile:
    """The turns so far. ``path`` None keeps them in memory only."""

    path: Path | None = None
    turns: list[Turn] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path | None) -> ConversationFile:
        """Read ``path``; a file that does not exist yet is an empty conversation."""
        if path is None or not path.exists():
            return cls(path)
        try:
            record = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise CommandError(f"{path}: not JSON: {error}") from None
        if not isinstance(record, list):
            raise CommandError(f"{path}: a list of turns is needed, not {type(record).__name__}")
        return cls(path, [_read_turn(path, index, turn) for index, turn in enumerate(record)])

    def add(self, role: str, *content: Part) -> None:
        """Append a turn."""
        self.turns.append(Turn(role, content))

    def save(self) -> None:
        """Write the file whole or not at all."""
        if self.path is None:
            return
        record = [
            {"role": turn.role, "content": [_write_part(part) for part in turn.content]}
            for turn in self.turns
        ]
        draft = self.path.with_name(self.path.name + ".new")
        draft.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", "utf-8")
        os.replace(draft, self.path)


def _read_turn(path: Path, index: int, record: object) -> Turn:
    where = f"{path}: turn {index}"
    if not isinstance(record, dict):
        raise CommandError(f"{where}: an object with role and content is needed")
    role, content = record.get("role"), record.get("content")
    if role not in ROLES:
        raise CommandError(f"{where}: role is {role!r}, not one of {', '.join(ROLES)}")
    if isinstance(content, str):
        return Turn(role, (content,))
    if not isinstance(content, list):
        raise CommandError(f"{where}: content is neither text nor a list of parts")
    return Turn(role, tuple(_read_part(where, part) for part in content))


def _read_part(where: str, part: object) -> Part:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, dict) and isinstance(part.get("image"), str):
        try:
            return base64.b64decode(part["image"], validate=True)
        except binascii.Error as error:
            raise CommandError(f"{where}: image is not base64: {error}") from None
    raise CommandError(f'{where}: a part is {{"text": ...}} or {{"image": base64}}')


def _write_part(part: Part) -> dict[str, str]:
    return {"text": part} if isinstance(part, str) else {"image": base64.b64encode(part).decode()}
