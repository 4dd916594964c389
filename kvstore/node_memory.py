"""The little that a node remembers of itself over a restart: its name, and the last member list it knew.

Either may fail to be written, on a disk that is full or read-only: the node serves all the same, and tries
again.
"""

from __future__ import annotations

import logging
import random

from cedar.kvstore.errors import InvalidRequest
from cedar.kvstore.members import MAX_NODE_ID, MemberList, from_json, to_json
from cedar.kvstore.state_file import StateText

log = logging.getLogger(__name__)


class NodeName:
    """The name that stays with a node's directory, made on first use."""

    def __init__(self, file: StateText, rng: random.Random) -> None:
        self._file = file
        self.name = (file.load() or "").strip()
        self._written = 0 < len(self.name) <= MAX_NODE_ID
        if not self._written:
            self.name = f"{rng.getrandbits(64):016x}"
            self.write()

    def write(self) -> None:
        """Write it down, if that has not worked yet."""
        if not self._written:
            try:
                self._file.save(self.name + "\n")
                self._written = True
            except OSError as error:
                log.warning("the node's name is not written down, will try again: %s", error)


class LastList:
    """The member list of before: should its holder be away at a start, these are the peers to ask."""

    def __init__(self, file: StateText) -> None:
        self._file = file
        self._noted = -1

    def load(self) -> MemberList | None:
        """The list; None when there is none that can be read."""
        try:
            text = self._file.load()
            return None if text is None else from_json(text)
        except (OSError, InvalidRequest) as error:
            log.warning("the last member list cannot be read: %s", error)
            return None

    def note(self, members: MemberList) -> None:
        """Write down a list that is not yet."""
        if members.epoch != self._noted:
            try:
                self._file.save(to_json(members))
                self._noted = members.epoch
            except OSError as error:
                log.info("the member list cannot be noted: %s", error)
