"""The same network in one process, its state simply kept: what every path through the pools must give."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from cedar.actors.prompts import Prompt
from cedar.model import load_network
from cedar.model.state import ImageSpan, KVMemory, SequenceState


class SingleProcess:
    """Greedy answers of the checkpoint at ``path``."""

    def __init__(self, path: str, page_tokens: int) -> None:
        torch.set_num_threads(1)  # the cluster's processes want the other cores
        self.network = load_network(path, page_tokens=page_tokens)
        self._features: dict[bytes, torch.Tensor] = {}

    def sequence(self, prompt: Prompt, room: int) -> tuple[KVMemory, SequenceState]:
        """Memory for a prompt and ``room`` more tokens; its images are encoded on the way."""
        for content_hash, file in prompt.files.items():
            if content_hash not in self._features:
                self._features[content_hash] = self.network.encode_image(self.network.prepare(file))
        memory, seq = self.network.own_sequence(list(prompt.ids), room)
        seq.images = tuple(
            ImageSpan(i.start, i.length, i.rows, i.columns, bytes(i.content_hash)) for i in prompt.images
        )
        return memory, seq

    def cold(self, prompt: Prompt, count: int) -> list[int]:
        """From nothing."""
        return self.run(*self.sequence(prompt, count), count)

    def second_turn(self, first: Prompt, reply: Sequence[int], second: Prompt, count: int) -> list[int]:
        """Goes on where the first turn ended; ``second.ids`` begin with the first prompt and its reply."""
        memory, seq = self.sequence(first, len(second.ids) - len(first.ids) + count)
        assert self.run(memory, seq, len(reply)) == list(reply)
        _, again = self.sequence(second, 0)
        again.pages, again.length = seq.pages, seq.length
        again.encoder_start, again.decoder_start = seq.encoder_start, seq.decoder_start
        return self.run(memory, again, count)

    def replayed(self, prompt: Prompt, hit_tokens: int, count: int) -> list[int]:
        """With pages up to ``hit_tokens`` and no window state: the last window is run again to rebuild it."""
        memory, seq = self.sequence(prompt, count)
        self.network.prefill(memory, seq, hit_tokens, self._features)
        _, again = self.sequence(prompt, 0)
        start = max(0, hit_tokens - self.network.config.window)
        again.pages, again.length, again.encoder_start, again.write_from = seq.pages, start, start, hit_tokens
        return self.run(memory, again, count)

    def run(self, memory: KVMemory, seq: SequenceState, count: int) -> list[int]:
        """Prefill what is left and generate ``count`` tokens."""
        self.network.prefill(memory, seq, len(seq.ids), self._features)
        logits = self.network.finish_prefill(memory, seq)
        tokens: list[int] = []
        while True:
            tokens.append(int(torch.argmax(logits)))
            seq.ids.append(tokens[-1])
            if len(tokens) == count:
                return tokens
            logits = self.network.decode(memory, [seq])[0]
