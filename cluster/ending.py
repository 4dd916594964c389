"""Whether tokens that have come make a whole answer. Pure.

A Decode worker may die between its last token and its last message: then nothing is left to resume.
"""

from __future__ import annotations

from collections.abc import Sequence

from cedar.v1 import common_pb2 as common


def ended(
    generated: Sequence[int], sampling: common.SamplingParams, end_token: int
) -> common.FinishReason | None:
    """Why these tokens are all that will come, None when more would. The rules are Decode's own."""
    if not generated:
        return None
    if generated[-1] in sampling.stop_ids or (generated[-1] == end_token and not sampling.ignore_eos):
        return common.FINISH_REASON_STOP
    if len(generated) >= sampling.max_tokens:
        return common.FINISH_REASON_LENGTH
    return None
