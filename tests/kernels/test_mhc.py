"""mHC against scalar fp32 arithmetic, one token and one number at a time (spec §6)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cedar.kernels.mhc import mhc_collapse, mhc_expand, mhc_mix
from cedar.kernels.mhc_ref import few_sum, ordered_sum, sigmoid

F = np.float32


def streams(tokens: int, hc: int, d: int, seed: int) -> torch.Tensor:
    return (torch.randn(tokens, hc, d, generator=torch.Generator().manual_seed(seed)) * 0.12).bfloat16()


def mix_weights(hc: int, d: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(hc)
    mixes = (2 + hc) * hc
    fn = torch.randn(mixes, hc * d, generator=g) / (hc * d) ** 0.5
    return fn, torch.tensor([0.7, 1.3, 0.9]), torch.randn(mixes, generator=g)


def slow_sinkhorn(logits: np.ndarray, eps: float, rounds: int) -> np.ndarray:
    """fp32 [hc, hc] of logits fp32 [hc, hc]; numpy scalars keep every step in fp32."""
    hc, e = len(logits), F(eps)
    c = [[F(torch.exp(torch.tensor(x - max(row)))) for x in row] for row in logits]
    total = [sum(row[1:], start=row[0]) for row in c]
    c = [[c[s][t] / total[s] + e for t in range(hc)] for s in range(hc)]
    for r in range(rounds):
        if r:
            total = [sum(row[1:], start=row[0]) + e for row in c]
            c = [[c[s][t] / total[s] for t in range(hc)] for s in range(hc)]
        total = [sum((c[s][t] for s in range(1, hc)), start=c[0][t]) + e for t in range(hc)]
        c = [[c[s][t] / total[t] for t in range(hc)] for s in range(hc)]
    return np.array(c, dtype=F)


@pytest.mark.parametrize(("hc", "d"), [(4, 32), (2, 16), (5, 8)])
def test_mix_equals_scalar_arithmetic(hc: int, d: int) -> None:
    x, (fn, scale, base) = streams(5, hc, d, hc), mix_weights(hc, d)
    pre, post, comb = mhc_mix(x, fn, scale, base, 1e-20, 1e-6, 20)
    for n in range(5):
        flat = x[n].double().flatten()
        z = ((fn.double() @ flat) / (flat.square().mean() + 1e-20).sqrt()).float().numpy()
        gate = z * scale.numpy().repeat([hc, hc, hc * hc]) + base.numpy()
        assert np.array_equal(comb[n].numpy(), slow_sinkhorn(gate[2 * hc :].reshape(hc, hc), 1e-6, 20))
        exact = 1 / (1 + np.exp(-gate.astype(np.float64)))
        np.testing.assert_allclose(pre[n], exact[:hc] + 1e-6, rtol=3e-7)
        np.testing.assert_allclose(post[n], 2 * exact[hc : 2 * hc], rtol=3e-7)
    assert torch.equal(mhc_mix(x, fn.double(), scale, base, 1e-20, 1e-6, 20)[2], comb)


def test_comb_is_nearly_doubly_stochastic_and_indexed_source_then_target() -> None:
    x, (fn, scale, base) = streams(50, 4, 32, 1), mix_weights(4, 32)
    base = base.clone()
    base[8 + 1 * 4 + 2] += 6.0  # source 1, target 2
    _, _, comb = mhc_mix(x, fn, scale, base, 1e-20, 1e-6, 20)
    torch.testing.assert_close(comb.sum(1), torch.ones(50, 4), rtol=1e-5, atol=0)
    torch.testing.assert_close(comb.sum(2), torch.ones(50, 4), rtol=0.1, atol=0)
    assert (comb[:, 1, 2] > 0.5).all()


def test_collapse_and_expand_round_once_in_the_stated_order() -> None:
    x, y = streams(6, 4, 8, 2), streams(6, 1, 8, 3)[:, 0]
    g = torch.Generator().manual_seed(4)
    pre, post, comb = (torch.rand(6, *shape, generator=g) for shape in ((4,), (4,), (4, 4)))
    collapsed, expanded = mhc_collapse(x, pre), mhc_expand(x, y, post, comb)
    xs, ys = x.float().numpy(), y.float().numpy()
    p, q, c = pre.numpy(), post.numpy(), comb.numpy()
    for n in range(6):
        sums = ((p[n, 0] * xs[n, 0] + p[n, 1] * xs[n, 1]) + p[n, 2] * xs[n, 2]) + p[n, 3] * xs[n, 3]
        assert torch.equal(collapsed[n], torch.from_numpy(sums).bfloat16())
        for t in range(4):
            mixed = ((c[n, 0, t] * xs[n, 0] + c[n, 1, t] * xs[n, 1]) + c[n, 2, t] * xs[n, 2]) + c[
                n, 3, t
            ] * xs[n, 3]
            assert torch.equal(expanded[n, t], torch.from_numpy(mixed + q[n, t] * ys[n]).bfloat16())


def test_torch_adds_up_to_four_values_in_order_in_every_layout() -> None:
    g = torch.Generator().manual_seed(5)
    for hc in (1, 2, 3, 4):
        for tokens in [*range(1, 40), 64, 129, 1000, 5001]:
            c = torch.rand(tokens, hc, hc, generator=g) * torch.exp(
                torch.randn(tokens, hc, hc, generator=g) * 3
            )
            for dim in (-1, -2):
                assert torch.equal(few_sum(c, dim), ordered_sum(c, dim)), (hc, tokens, dim)


def test_sigmoid_does_not_depend_on_position() -> None:
    x = torch.randn(40_000, generator=torch.Generator().manual_seed(6)) * 3
    whole = sigmoid(x)
    for length in range(1, 70):
        assert torch.equal(sigmoid(x[100 : 100 + length]), whole[100 : 100 + length]), length
    assert torch.equal(sigmoid(x[:39_999]), whole[:39_999])
    torch.testing.assert_close(whole, torch.sigmoid(x), rtol=3e-7, atol=0)
    assert sigmoid(x[:0]).shape == (0,)
