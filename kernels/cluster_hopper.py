# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Programs of one cluster on Hopper: launched together on neighbouring multiprocessors, they write into one
another's shared memory.

A kernel is compiled as if it were alone and started in clusters along its grid's first axis: program_id(0) is
the rank within the cluster. Beside what Gluon allocates it has one area of its own, by its address:

    base = area(SIZE + 16); expect(base + SIZE, bytes); arrive_ready()  # at the start: this program runs
    wait(); send(base, base + SIZE, ...)                                 # all run
    received(base + SIZE); pull(base + ...)                              # all that is for this one is there

Or `push` instead, without `expect`, and `arrive(); wait()` after it: that barrier waits for the program's
writes to memory, too (a fence of the whole card).
"""

from __future__ import annotations

import ctypes

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

AREA_BYTES = 48 * 1024  # what ptxas allows for a variable
UNASKED = 48 * 1024  # shared memory that a launch may take without asking
AREA_ALIGNMENT = 1024  # Gluon's shared memory begins after it, and swizzled tiles must be aligned


@gluon.constexpr_function
def area_bytes(size):
    """Shared memory that an area of `size` bytes takes."""
    return (size + AREA_ALIGNMENT - 1) // AREA_ALIGNMENT * AREA_ALIGNMENT


@gluon.constexpr_function
def _declaration(size):
    return f".shared .align 16 .b8 cluster_area[{area_bytes(size)}];\nmov.u32 $0, cluster_area;"


@gluon.jit
def area(SIZE: gl.constexpr):
    """The address of SIZE bytes; once a kernel."""
    return gl.inline_asm_elementwise(_declaration(SIZE), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _end(size):
    """What follows Gluon's own in the shared memory that a launch asks for."""
    return f"""{{
.reg .b32 a;
mov.u32 a, %dynamic_smem_size;
mov.u32 $0, global_smem;
add.u32 $0, $0, a;
sub.u32 $0, $0, {end_bytes(size)};
}}"""


@gluon.constexpr_function
def end_bytes(size):
    """Shared memory that an area of `size` bytes at the end takes."""
    return (size + 127) // 128 * 128


@gluon.jit
def end(SIZE: gl.constexpr):
    """The address of SIZE bytes at the end of a launch's shared memory, which `launch` is told of."""
    return gl.inline_asm_elementwise(_end(SIZE), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive():
    """Tells the cluster that this program has come so far and written what it wrote."""
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def arrive_ready():
    """As `arrive`, for a program that has only set up its barriers (`expect`): spares a fence of the card."""
    gl.inline_asm_elementwise(
        "fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.relaxed.aligned; // $0", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait():
    """Waits until every program of the cluster has arrived, and sees what they wrote."""
    gl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire.aligned; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def push(base, values, offset, rank, mine):
    """Writes fp32 `values` to byte `offset` of the area of program `rank` of the cluster, where `mine`: all
    of one shape and layout.
    """
    gl.inline_asm_elementwise(
        """{
.reg .b32 a;
.reg .pred p;
setp.ne.b32 p, $5, 0;
add.u32 a, $1, $3;
mapa.shared::cluster.u32 a, a, $4;
@p st.shared::cluster.b32 [a], $2;
mov.b32 $0, a;
}""",
        "=r,r,r,r,r,r", [base + offset * 0, values, offset, rank, mine.to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def expect(barrier, bytes):
    """Sets up the mbarrier at address `barrier` of this program's area, for so many bytes from the cluster.

    Before `arrive`.
    """
    gl.inline_asm_elementwise(
        """{
.reg .pred p;
.reg .b32 t;
mov.u32 t, %tid.x;
setp.eq.u32 p, t, 0;
@p mbarrier.init.shared::cta.b64 [$1], 1;
@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2;
mov.b32 $0, t;
}""",
        "=r,r,r", [barrier, bytes], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def send(base, barrier, values, offset, rank, mine):
    """Sends fp32 `values` to byte `offset` of the area of program `rank` of the cluster, where `mine`: all of
    one shape and layout. They count for that program's `barrier`; nobody waits for the cluster.
    """
    gl.inline_asm_elementwise(
        """{
.reg .b32 a, b;
.reg .pred p;
setp.ne.b32 p, $6, 0;
add.u32 a, $1, $4;
mapa.shared::cluster.u32 a, a, $5;
mapa.shared::cluster.u32 b, $2, $5;
@p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [a], $3, [b];
mov.b32 $0, a;
}""",
        "=r,r,r,r,r,r,r", [base + offset * 0, barrier + offset * 0, values, offset, rank, mine.to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def send_fours(base, barrier, values, offset, rank, own, mine):
    """As `send`, four values that follow one another in a thread at a time, to the offset of the first. What
    is for program `own`, this one, is stored and does not count; a barrier of the program must follow.
    """
    gl.inline_asm_elementwise(
        """{
.reg .b32 a, b;
.reg .pred p, q;
setp.ne.b32 p, $28, 0;
setp.eq.and.b32 q, $20, $24, p;
setp.ne.and.b32 p, $20, $24, p;
add.u32 a, $4, $16;
@q st.shared.v4.b32 [a], {$12, $13, $14, $15};
mapa.shared::cluster.u32 a, a, $20;
mapa.shared::cluster.u32 b, $8, $20;
@p st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [a], {$12, $13, $14, $15}, [b];
mov.b32 $0, a;
mov.b32 $1, a;
mov.b32 $2, a;
mov.b32 $3, a;
}""",
        "=r,=r,=r,=r" + ",r" * 28,
        [base + offset * 0, barrier + offset * 0, values, offset, rank, own + offset * 0, mine.to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def keep_fours(base, values, offset, mine):
    """Stores fp32 `values`, four that follow one another in a thread at a time, to the byte `offset` of the
    first in this program's area, where `mine`; a barrier of the program must follow.
    """
    gl.inline_asm_elementwise(
        """{
.reg .b32 a;
.reg .pred p;
setp.ne.b32 p, $16, 0;
add.u32 a, $4, $12;
@p st.shared.v4.b32 [a], {$8, $9, $10, $11};
mov.b32 $0, a;
mov.b32 $1, a;
mov.b32 $2, a;
mov.b32 $3, a;
}""",
        "=r,=r,=r,=r" + ",r" * 16, [base + offset * 0, values, offset, mine.to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def received(barrier):
    """Waits for what `expect` named."""
    gl.inline_asm_elementwise(
        """{
.reg .pred p;
AGAIN:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$1], 0;
@!p bra AGAIN;
mov.b32 $0, 0;
}""",
        "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def pull(address):
    """fp32 of this program's area; four neighbours in a thread must be neighbours there, 16 bytes aligned."""
    return gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r,r,r,r", [address],
        dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


def _ask(compiled, shared: int) -> bool:
    """Asks CUDA for `shared` bytes beside an area: Triton asks by its own share alone."""
    compiled._init_handles()
    dynamic = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    failed = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(
        ctypes.c_void_p(compiled.function), dynamic, shared
    )
    if failed:
        raise RuntimeError(f"cuFuncSetAttribute: error {failed} for {shared} bytes")
    return True


def launch(kernel, grid: tuple[int, ...], cluster: int, *arguments, num_warps: int, end: int = 0) -> None:
    """Starts `kernel`, compiled for one program, on `grid` with `cluster` programs for each along the first
    axis; 1: without clusters. Programmatic launch either way. `end`: bytes of the area that it has by `end`.
    """
    if cluster == 1 and not end:
        kernel[grid](*arguments, num_warps=num_warps, launch_pdl=True)
        return
    compiled = kernel.run(*arguments, grid=grid, warmup=True, num_warps=num_warps, launch_pdl=True)
    compiled = compiled.result() if hasattr(compiled, "result") else compiled
    # (warps, programs a cluster, shared memory): Triton compiles clusters differently and launches them alike
    warps, _, shared = compiled.packed_metadata
    if end:
        shared = (compiled.metadata.shared + 127) // 128 * 128 + end_bytes(end)
    compiled.packed_metadata = (warps, cluster, shared)
    if shared <= UNASKED and not hasattr(compiled, "asked"):
        compiled.asked = _ask(compiled, shared)
    compiled[grid](*arguments)
