"""The kernel of :mod:`cute_programs`; needs ``nvidia-cutlass-dsl``, which evaluates annotations."""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as helpers
from cute_programs import THREADS, Program
from cutlass.cute.nvgpu import tcgen05
from cutlass.cute.runtime import make_fake_compact_tensor

OPERATIONS = {
    "F16BF16": lambda dtype, result, extent, group, modes: tcgen05.MmaF16BF16Op(
        dtype, result, extent, group, *modes
    ),
    "TF32": lambda dtype, result, extent, group, modes: tcgen05.MmaTF32Op(extent, group, *modes),
    "F8": lambda dtype, result, extent, group, modes: tcgen05.MmaFP8Op(
        dtype, result, extent, group, *modes
    ),
    "I8": lambda dtype, result, extent, group, modes: tcgen05.MmaI8Op(dtype, extent, group, *modes),
}
"""Instructions by kind."""


def compile_program(one: Program) -> str:
    """The PTX of a program."""
    dtype, result = getattr(cutlass, one.dtype), getattr(cutlass, one.result)
    step = 256 // dtype.width
    tile = (one.m, one.n, one.k)
    columns = max(32, 1 << (one.n - 1).bit_length())

    def major(across: bool) -> Any:
        return getattr(tcgen05.OperandMajorMode, "MN" if across else "K")

    @cute.kernel
    def kernel(
        product: cute.TiledMma,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = cutlass.utils.SmemAllocator()
        done = shared.allocate_array(cutlass.Int64, 1)
        place = shared.allocate_array(cutlass.Int32, 1)
        left = shared.allocate_tensor(
            element_type=dtype, layout=a_layout.outer, byte_alignment=1024, swizzle=a_layout.inner
        )
        right = shared.allocate_tensor(
            element_type=dtype, layout=b_layout.outer, byte_alignment=1024, swizzle=b_layout.inner
        )
        if warp == 0:
            cute.arch.alloc_tmem(columns, place)
        if thread == 0:
            cute.arch.mbarrier_init(done, 1)
        cute.arch.mbarrier_init_fence()
        for number in cutlass.range(thread, one.m * one.k, THREADS):
            row, depth = number // one.k, number % one.k
            left[(row, depth % step), 0, depth // step, 0] = a[row, depth]
        for number in cutlass.range(thread, one.n * one.k, THREADS):
            row, depth = number // one.k, number % one.k
            right[(row, depth % step), 0, depth // step, 0] = b[row, depth]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        pointer = cute.arch.retrieve_tmem_ptr(result, 16, place)
        shape = product.partition_shape_C(tile[:2])
        sums = cute.make_tensor(pointer, product.make_fragment_C(shape).layout)
        if warp == 0:
            operands = product.make_fragment_A(left), product.make_fragment_B(right)
            for block in cutlass.range_constexpr(one.k // step):
                chosen = (None, None, block, 0)
                cute.gemm(product, sums, operands[0][chosen], operands[1][chosen], sums)
                product.set(tcgen05.Field.ACCUMULATE, True)
            with cute.arch.elect_one():
                tcgen05.commit(done)
        cute.arch.mbarrier_wait(done, 0)
        shapes = {
            "32x32b": tcgen05.Ld32x32bOp,
            "16x64b": tcgen05.Ld16x64bOp,
            "16x128b": tcgen05.Ld16x128bOp,
            "16x256b": tcgen05.Ld16x256bOp,
        }
        repeat = getattr(tcgen05.Repetition, f"x{one.repeat}")
        atom = cute.make_copy_atom(shapes[one.load](repeat), result)
        inside = sums[(None, None), 0, 0]
        outside = product.get_slice(0).partition_C(c)[(None, None), 0, 0]
        copy = tcgen05.make_tmem_copy(atom, inside)
        own = copy.get_slice(thread)
        source, target = own.partition_S(inside), own.partition_D(outside)
        held = cute.make_rmem_tensor(target.shape, result)
        cute.copy(copy, source, held)
        cute.autovec_copy(held, target)
        cute.arch.fence_view_async_tmem_load()
        cute.arch.sync_threads()
        if warp == 0:
            cute.arch.relinquish_tmem_alloc_permit()
            cute.arch.dealloc_tmem(pointer, columns)

    @cute.jit
    def host(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        modes = (tcgen05.OperandSource.SMEM, major(one.across[0]), major(one.across[1]))
        group, extent = tcgen05.CtaGroup.ONE, (one.m, one.n, step)
        product = cute.make_tiled_mma(OPERATIONS[one.kind](dtype, result, extent, group, modes))
        layouts = (
            helpers.make_smem_layout_a(product, tile, dtype, 1),
            helpers.make_smem_layout_b(product, tile, dtype, 1),
        )
        kernel(product, a, b, c, *layouts).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    def fake(rows: int, width: int, kind: Any) -> Any:
        return make_fake_compact_tensor(kind, (rows, width), stride_order=(1, 0), assumed_align=16)

    made = cute.compile(
        host, fake(one.m, one.k, dtype), fake(one.n, one.k, dtype), fake(one.m, one.n, result)
    )
    return str(made.__ptx__)
