"""The sampler against a plain restatement of its rules, its statistics under fixed seeds, its refusals."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from cedar.model.prompt_errors import LogitsError, SamplingError
from cedar.model.sampling import SampledToken, SamplingParams, sample, sample_batch, uniform
from hypothesis import given, settings
from hypothesis import strategies as st

LOGITS = torch.randn(64, 40, generator=torch.manual_seed(7)) * 2

params_of_any_kind = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 3, 10, 40, 1000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([0, 1, 5, 20]),
)
# Few distinct values, so that ties are everywhere.
tied_logits = st.lists(st.integers(-3, 3), min_size=2, max_size=30).map(lambda row: torch.tensor(row).float())


def restated(logits: list[float], params: SamplingParams, u: float) -> int:
    """The rules one by one, in plain Python: which id a draw u picks."""
    ids = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if params.greedy:
        return ids[0]
    top = max(logits)
    weight = {i: math.exp((logits[i] - top) / params.temperature) for i in ids}
    ids = [i for i in ids if weight[i] >= params.min_p]
    if params.top_k:
        ids = ids[: params.top_k]
    if params.top_p < 1:
        goal = params.top_p * sum(weight[i] for i in ids)
        mass = 0.0
        for n, i in enumerate(ids, start=1):
            mass += weight[i]
            if mass >= goal:
                ids = ids[:n]
                break
    if params.top_k == 0 and params.top_p == 1:
        ids.sort()
    target = u * sum(weight[i] for i in ids)
    for i in ids:
        target -= weight[i]
        if target < 0:
            return i
    return ids[-1]


@given(st.integers(0, 63), params_of_any_kind, st.integers(0, 2**20))
@settings(max_examples=300)
def test_the_choice_follows_the_rules(row, params, position):
    token = sample(LOGITS[row], params, position)
    assert token.id == restated(LOGITS[row].tolist(), params, uniform(params.seed, position))


@given(tied_logits, params_of_any_kind, st.integers(0, 100))
def test_ties_go_to_the_lower_id(logits, params, position):
    token = sample(logits, params, position)
    assert token.id == restated(logits.tolist(), params, uniform(params.seed, position))
    order = sorted(range(len(logits)), key=lambda i: (-logits[i].item(), i))
    assert [i for i, _ in token.top] == order[: params.logprobs]


@given(st.lists(params_of_any_kind, min_size=1, max_size=8), st.data())
def test_a_batch_equals_its_members_alone(params, data):
    rows = data.draw(st.lists(st.integers(0, 63), min_size=len(params), max_size=len(params)))
    positions = data.draw(st.lists(st.integers(0, 1000), min_size=len(params), max_size=len(params)))
    together = sample_batch(LOGITS[rows], params, positions)
    assert together == [sample(LOGITS[r], p, at) for r, p, at in zip(rows, params, positions, strict=True)]


def test_a_batch_of_a_full_vocabulary_equals_its_members_alone():
    logits = torch.randn(5, 129_280, generator=torch.manual_seed(2)) * 3
    params = [
        SamplingParams(temperature=0, logprobs=3),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_p=0.9, logprobs=20),
        SamplingParams(seed=3, top_k=50),
        SamplingParams(seed=4, min_p=0.1, top_p=0.999999),
    ]
    together = sample_batch(logits, params, range(5))
    assert together == [sample(logits[i], params[i], i) for i in range(5)]


def test_draws_are_the_same_everywhere():
    """Constants, so that another machine, library or release that differs fails here."""
    assert uniform(0, 0) == 0.8141616356902891
    assert uniform(2**64 - 1, 1_000_000) == 0.43470129463121854
    assert uniform(7, 3, stream=1) == 0.6977794377697213


def test_draws_differ_by_seed_position_and_stream():
    draws = {uniform(s, p, n) for s in range(20) for p in range(20) for n in range(3)}
    assert len(draws) == 20 * 20 * 3
    assert all(0 <= u < 1 for u in draws)


@pytest.mark.parametrize("axis", ["seed", "position"])
def test_draws_are_uniform(axis):
    n, bins = 20_000, 50
    draws = [uniform(i, 5) if axis == "seed" else uniform(5, i) for i in range(n)]
    counts = [0] * bins
    for u in draws:
        counts[int(u * bins)] += 1
    assert chi_square(counts, [n / bins] * bins) < 85.4  # 99.9 % of chi-square with 49 degrees of freedom
    pairs = sum((a - 0.5) * (b - 0.5) for a, b in pairwise(draws)) / n * 12
    assert abs(pairs) < 0.025  # neighbours are uncorrelated: 3.5 standard deviations


@pytest.mark.parametrize(
    ("params", "bound"),
    [
        ({}, 30.0),
        ({"temperature": 0.5}, 30.0),
        ({"top_k": 4}, 16.3),
        ({"top_p": 0.8}, 20.6),
        ({"min_p": 0.2}, 20.6),
    ],
)
def test_frequencies_follow_the_filtered_distribution(params, bound):
    logits = torch.tensor([1.0, 0.2, -0.5, 1.6, 0.9, -1.0, 0.0, 0.4, -0.2, 1.1])
    n = 4000
    p = SamplingParams(seed=11, **params)
    tokens = sample_batch(logits.expand(n, -1), [p] * n, range(n))
    expected = filtered(logits.tolist(), p)
    counts = [sum(t.id == i for t in tokens) for i in range(10)]
    assert all(counts[i] == 0 for i in range(10) if expected[i] == 0)
    kept = [i for i in range(10) if expected[i]]
    assert chi_square([counts[i] for i in kept], [n * expected[i] for i in kept]) < bound


def filtered(logits: list[float], params: SamplingParams) -> list[float]:
    """The distribution that is drawn from: how much of [0, 1) each id answers to."""
    steps = 20_000
    counts = [0] * len(logits)
    for k in range(steps):
        counts[restated(logits, params, (k + 0.5) / steps)] += 1
    return [count / steps for count in counts]


def chi_square(counts: list[int], expected: list[float]) -> float:
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    for top_p, kept in [(0.5, 2), (0.51, 3), (0.75, 3), (0.25, 1), (0.01, 1)]:
        params = SamplingParams(top_p=top_p, seed=3)
        drawn = sample_batch(torch.zeros(200, 4), [params] * 200, range(200))
        assert {token.id for token in drawn} == set(range(kept))


def test_ties_beyond_the_ranked_candidates_go_to_the_lower_id():
    logits = torch.zeros(60, 5000)
    logits[:, 4000] = 1.0
    params = SamplingParams(top_k=4, seed=3, logprobs=4)
    tokens = sample_batch(logits, [params] * 60, range(60))
    assert {token.id for token in tokens} == {4000, 0, 1, 2}
    assert all([i for i, _ in token.top] == [4000, 0, 1, 2] for token in tokens)


def test_log_probabilities_are_of_the_plain_distribution():
    params = SamplingParams(temperature=0.1, top_k=2, logprobs=3, seed=9)
    token = sample(LOGITS[0], params, 4)
    plain = LOGITS[0].double().log_softmax(-1)
    assert token.logprob == pytest.approx(plain[token.id].item(), abs=1e-6)
    assert [lp for _, lp in token.top] == pytest.approx(plain.topk(3).values.tolist(), abs=1e-6)
    assert [i for i, _ in token.top] == plain.topk(3).indices.tolist()


def test_extreme_logits_and_temperatures_are_harmless():
    logits = torch.tensor([3e38, -3e38, 3e38, 0.0])
    for temperature in (0.0, 1e-30, 1.0, 100.0):
        for top_p in (1.0, 1e-30):
            token = sample(logits, SamplingParams(temperature=temperature, top_p=top_p, seed=1), 2)
            assert token.id in (0, 2)
            assert token.logprob == pytest.approx(math.log(0.5))
    assert sample(torch.tensor([5.0]), SamplingParams(logprobs=5), 0) == SampledToken(0, 0.0, ((0, 0.0),))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_name_their_rows(bad):
    logits = LOGITS[:4].clone()
    logits[1, 3] = logits[3, 0] = bad
    with pytest.raises(LogitsError, match=r"rows=\[1, 3\]") as caught:
        sample_batch(logits, [SamplingParams()] * 4, range(4))
    assert caught.value.rows == (1, 3)


def test_rows_params_and_positions_must_agree():
    with pytest.raises(ValueError, match="4 rows, 3 params, 4 positions"):
        sample_batch(LOGITS[:4], [SamplingParams()] * 3, range(4))


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("temperature", -0.1, "from 0 to 100"),
        ("temperature", math.nan, "from 0 to 100"),
        ("temperature", math.inf, "from 0 to 100"),
        ("temperature", "1", "from 0 to 100"),
        ("temperature", True, "from 0 to 100"),
        ("top_p", 0.0, "above 0"),
        ("top_p", 1.1, "from 0 to 1"),
        ("min_p", -1, "from 0 to 1"),
        ("top_k", -1, "from 0 to"),
        ("top_k", 2.0, "an integer"),
        ("seed", 2**64, "from 0 to 18446744073709551615"),
        ("seed", -1, "from 0 to"),
        ("max_tokens", 0, "from 1 to"),
        ("logprobs", 21, "from 0 to 20"),
        ("stop", "text", "a sequence of strings"),
        ("stop", ("",), "1 to 256 characters"),
        ("stop", ("x" * 257,), "1 to 256 characters"),
        ("stop", ("x",) * 17, "at most 16"),
        ("stop_ids", (-1,), "from 0 to"),
        ("stop_ids", tuple(range(17)), "at most 16"),
    ],
)
def test_values_out_of_range_are_named(field, value, limit):
    with pytest.raises(SamplingError, match=f"sampling: {field}=.*{limit}") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_fractions_are_kept_as_on_the_wire():
    once = SamplingParams(temperature=0.7, top_p=0.9, min_p=0.1, stop=["a"], stop_ids=[4])
    again = SamplingParams(temperature=once.temperature, top_p=once.top_p, min_p=once.min_p)
    assert (again.temperature, again.top_p, again.min_p) == (once.temperature, once.top_p, once.min_p)
    assert once.temperature == torch.tensor(0.7).item()
    assert (once.stop, once.stop_ids) == (("a",), (4,))
