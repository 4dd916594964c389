# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What Hopper kernels of several files share: programmatic launch, a meeting of programs, paired conversions.

Programmatic launch: a kernel started with `launch_pdl=True` may begin while the launch before it still runs.
It may read what never changes (weights, scales) at once and must call `grid_wait` before it touches anything
else.
"""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # renamed after Triton 3.6
COUNTER_STEP = gl.constexpr(8)  # between counters that many wait at: a sector each
# The two fp16 of a word as fp32.
SINGLES = gl.constexpr("{\n.reg .b16 l, h;\nmov.b32 {l, h}, $2;\ncvt.f32.f16 $0, l;\ncvt.f32.f16 $1, h;\n}")


@cache
def counters(index: int) -> torch.Tensor:
    """Counters of `meet` on CUDA device `index`; calls share them, so one stream at a time."""
    return torch.zeros(65_536, dtype=torch.int32, device=f"cuda:{index}")


@gluon.jit
def grid_wait():
    """Waits for what the launch before this one wrote."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def grid_release():
    """Lets the launch after this one start."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fence_barriers():
    """Bulk copies see the barriers that were set up; `fence_async_shared` would wait for loads in flight."""
    gl.inline_asm_elementwise(
        "fence.mbarrier_init.release.cluster; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _prefetch(parameter):
    return f"prefetch.param.tensormap [{parameter}]; mov.b32 $0, 0;"


@gluon.jit
def fetch_descriptor(PARAMETER: gl.constexpr):
    """Brings a bulk copy's descriptor, the parameter of that name in PTX, near, lest the first copy wait."""
    gl.inline_asm_elementwise(_prefetch(PARAMETER), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def meet(cell, SPLITS: gl.constexpr):
    """Waits until all SPLITS (at most 64) programs of a group are here; a call adds 64 to the counter.

    The programs of a group must be neighbours in launch order: then those that wait are never all that run.
    """
    STEP: gl.constexpr = 64 // SPLITS if 64 % SPLITS == 0 else 1
    barrier()
    old = gl.atomic_add(cell, STEP, sem="acq_rel")
    goal = (old & -64) + 64
    seen = old + STEP
    if STEP * SPLITS < 64:  # noqa: SIM102  (one is decided when it is compiled)
        if (old & 63) == SPLITS - 1:
            seen = gl.atomic_add(cell, 64 - SPLITS, sem="acq_rel") + 64 - SPLITS
    while seen - goal < 0:
        seen = gl.atomic_add(cell, 0, sem="acquire")
    barrier()


# Until the counter at $1 has come to $2; what others wrote before they arrived can be read then.
_UNTIL = gl.constexpr("""{
.reg .pred p;
.reg .b32 v;
AGAIN:
ld.acquire.gpu.global.b32 v, [$1];
sub.s32 v, v, $2;
setp.lt.s32 p, v, 0;
@p bra AGAIN;
mov.b32 $0, v;
}""")


@gluon.jit
def goal_of(cell):
    """What a counter will read when all of a launch's programs have arrived: arrivals add up to 64.

    For programs that do not wait at once, or not all: `goal_of` before, then `arrive`, then `wait_for`, which
    costs less than `meet`, as nothing is read back on the way. Neighbours in launch order, as there.
    """
    return (gl.load(cell, volatile=True) & -64) + 64


@gluon.jit
def arrive(cell, amount):
    """What this program's (or this trade's) threads have written can be read by those who wait."""
    barrier()
    gl.atomic_add(cell, amount, sem="release")


@gluon.jit
def wait_for(cell, goal):
    """Every thread waits for the counter by itself."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    zero = gl.full([32 * gl.num_warps()], 0, gl.int32, layout)
    gl.inline_asm_elementwise(
        _UNTIL, "=r,l,r", [zero.to(gl.int64) + cell.to(gl.int64, bitcast=True), zero + goal],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def half(x):
    """fp32 rounded to bf16, two at a time: single conversions run at an eighth of the rate."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )
