# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The softmax of a trade of four warps over tiles of scores, 64 heads and 64 keys, on Hopper (spec §3)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Barriers of one kind. An array of all kinds would make Triton let a trade's warps meet between one that
    is arrived at and another that is waited for.
    """
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(COUNT):
        mbarrier.init(bars.index(b), count=ARRIVALS)
    return bars


@gluon.jit
def _do(CODE: gl.constexpr):
    return gl.inline_asm_elementwise(CODE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


# Whether a warp's rows must be rescaled is a branch of that warp alone; Gluon reduces over a whole trade, at
# the price of two barriers. So a flag in a register of PTX, one of each trade, takes it along.
@gluon.constexpr_function
def _flag(trade):
    return f".reg .b32 raise_{trade}; mov.b32 raise_{trade}, 0; mov.u32 $0, 0;"


@gluon.constexpr_function
def _mark(trade):
    return f"{{.reg .pred p; setp.gt.f32 p, $1, $2; @p mov.b32 raise_{trade}, 1; mov.b32 $0, 0;}}"


@gluon.constexpr_function
def _vote(trade):
    return (
        f"{{.reg .pred p; setp.ne.u32 p, raise_{trade}, 0; vote.sync.any.pred p, p, -1; "
        f"selp.b32 $0, 1, 0, p; mov.b32 raise_{trade}, 0;}}"
    )


@gluon.jit
def set_flag(TRADE: gl.constexpr):
    """Once, before a trade's first `any_above`."""
    _do(_flag(TRADE))


@gluon.jit
def any_above(x, limit, TRADE: gl.constexpr):
    """Whether a thread of this warp has an x above the limit."""
    gl.inline_asm_elementwise(_mark(TRADE), "=r,f,f", [x, limit], dtype=gl.int32, is_pure=False, pack=1)
    return _do(_vote(TRADE)) != 0


@gluon.jit
def halves_of(x):
    """The left and right half of the columns of [64, N]."""
    return gl.split(gl.permute(gl.reshape(x, [64, 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def own_most(x):
    """[64, 4], a thread's own: the greatest of its columns of [64, 64]; others have the rest of a row."""
    a, b = halves_of(x)
    a, b = halves_of(gl.maximum(a, b))
    a, b = halves_of(gl.maximum(a, b))
    a, b = gl.split(gl.reshape(gl.maximum(a, b), [64, 4, 2]))
    return gl.maximum(a, b)


@gluon.jit
def own_sum(x):
    """The same of the sum."""
    a, b = halves_of(x)
    a, b = halves_of(a + b)
    a, b = halves_of(a + b)
    a, b = gl.split(gl.reshape(a + b, [64, 4, 2]))
    return a + b


@gluon.jit
def softmax_step(s, scale, top, total, slack, TRADE: gl.constexpr):
    """p of scores [64, 64] and by how much what was summed shrinks; the new maximum [64] and sums [64, 4].

    The maximum is raised only where a p would come to more than 2^slack: so rows are reduced across threads
    only then, in a warp's own branch, and sums at the end.
    """
    most = own_most(s) * scale
    own: gl.constexpr = gl.SliceLayout(1, most.type.layout)
    shrink = gl.full([64], 1.0, gl.float32, top.type.layout)
    if any_above(most, gl.convert_layout(top + slack, own, assert_trivial=True)[:, None], TRADE):
        higher = gl.convert_layout(gl.max(most, axis=1), top.type.layout, assert_trivial=True)
        higher = gl.where(higher > top + slack, higher, top)
        shrink = gl.exp2(top - higher)
        top = higher
        total = total * gl.convert_layout(shrink, own, assert_trivial=True)[:, None]
    p = gl.exp2(s * scale - top[:, None])
    return p, shrink, top, total + own_sum(p)
