"""What fails in JAX's own tests (tag jax-v0.11.0, JAX 0.11.2) for reasons that are the tests' own.

``FAILURES`` are those when JAX compiles its kernels and the simulator runs them, ``DIFFERENCES``
those when Pallasite compiles them, which differs on purpose (``docs/migrating.md``). ``FINDINGS``
are what the sanitizer finds in kernels of the tests, whoever compiles them; what it finds depending
on that is in ``FINDINGS_OF_JAX`` and ``FINDINGS_HERE``. Kernels with findings give right results:
the runner makes sure of it.
"""

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Own:
    """A failure, or something that the sanitizer finds.

    Attributes:
      why: the reason.
      tests: a regular expression for names of methods.
      text: one for the reason of the failure, or for what was found.
    """

    why: str
    tests: str
    text: str


FAILURES = (
    Own(
        "the test calls what JAX 0.11.2 no longer has",
        "",
        r"unexpected keyword argument '(manual_ready_barriers|impl)'",
    ),
    Own(
        "the test expects other LLVM IR of the host",
        "test_griddepcontrol_multi_kernel",
        "Regex didn't match: 'define void @kernel_",
    ),
    Own("the test expects an error that JAX 0.11.2 does not raise", "", "NotImplementedError not"),
    Own(
        "JAX 0.11.2 checks closures earlier, with another error",
        "test_errors_when_closing_over_array",
        "captures non-scalar array constants",
    ),
    Own(
        "JAX 0.11.2 refuses tilings without a swizzle before",
        "test_collapsing_several_non_unit_tiled_dimensions_raises",
        "Tiling without swizzle is not supported",
    ),
    Own("JAX 0.11.2 cannot ask a reference for its space", "", "'memory_space' attribute is not"),
    Own(
        "since JAX 0.11.1, threads that cancel together are named; here each cancels for itself",
        "test_cluster_launch_control",
        "Arrays are not equal|try_cancel",
    ),
    Own(
        "reads and writes behind the ends of arrays",
        "test_copy_gmem_to_smem_clamped_arrivals|test_program_id_in_block_spec",
        "CpuCallback error",
    ),
    Own(
        "compares all bits of sums with JAX's on the CPU, whose order is another",
        "test_realistic_matmul$",
        "Arrays are not equal",
    ),
    Own("prints with a format that CUDA does not know", "test_cond", "CpuCallback error"),
    Own(
        "the test looks at how JAX calls a kernel on a GPU",
        "test_export_succeeds|test_lower_with_abstract_mesh|test_lowering|test_input_output_alias"
        "|test_ragged_dot_shard_map_check_vma",
        "host_callbacks|device assignment|output_operand_aliases|Only interpret mode",
    ),
)

FINDINGS = (
    Own("blocks read and write the same place", "test_cluster$", "data race in global memory"),
    Own(
        "several blocks or threads write the same result",
        r"test_tmem1|test_tma_load_multicast|test_carry_accumulate",
        r"in global memory(.|\n)* a bulk copy (.|\n)*, which wrote it",
    ),
    Own(
        "no commit_smem before a copy or product",
        r"test_get_swap_with|test_no_output|test_warp_specialized_([st]mem_slice|transpose)"
        "|test_async_copy_sparse_metadata_smem_to_tmem_warp",
        "missing fence.proxy.async",
    ),
    Own(
        "no wait_smem_to_gmem at the end",
        "test_loading_from_ref_union|test_smem_aliasing|test_smem_gmem_transposed_copies"
        "|test_async_copy_sparse_metadata_smem_to_tmem_warp",
        "thread ends before its asynchronous operation",
    ),
    Own(
        "the last copies of a product are not waited for before its blocks end",
        "test_blackwell_matmul|test_ragged_dot",
        "thread ends before its asynchronous operation|block ends while its shared memory is in",
    ),
    Own(
        "a block overwrites what only its pair knows to be loaded",
        "test_ragged_dot",
        "asynchronous operation not waited for, in tensor memory",
    ),
    Own(
        "two threads copy the same buffer, and each waits for its own stores",
        "test_carry_accumulate",
        "data race with an asynchronous operation in shared memory",
    ),
    Own(
        "copies to tensor memory that nobody waits for",
        "test_async_copy_sparse_metadata_smem_to_tmem_warp|test_tmem_alloc_within_warp_map",
        "in tensor memory|kernel ends before its asynchronous operation",
    ),
    Own(
        "blocks end while others read their shared memory",
        "test_cluster_ref_read",
        "block ends while its shared memory is in use",
    ),
    Own(
        "what only a part was copied or written of is used as a whole",
        "test_copy_gmem_to_smem|test_async_prefetch|test_tmem_alloc_within_warp_map|test_print"
        "|profiler|test_wgmma_fence_ptx",
        "read of uninitialized shared memory",
    ),
)

FINDINGS_OF_JAX = (
    Own(
        "one thread arrives for others that may still read a result of try_cancel",
        "test_dynamic_work_scheduling",
        r"data race with an asynchronous(.|\n)* clusterlaunchcontrol\.try_cancel",
    ),
    Own(
        "JAX loads what it overwrites, by ldmatrix",
        "",
        r"(uninitialized|data race in) shared memory(.|\n)* ldmatrix\.",
    ),
)

FINDINGS_HERE = (
    Own(
        "the output is copied to itself before anything was written",
        "test_cluster$|test_debug_print$",
        "read of uninitialized global memory",
    ),
    Own(
        "the output is never written",
        "test_print_layout_tmem_with_transforms|test_emit_with_dynamic_grid_smaller",
        "output never written",
    ),
    Own("the test looks only at what its kernel writes", "", "output written in part"),
    Own(
        "no wait_smem_to_gmem at the end",
        "test_indexing_after_transpose",
        "thread ends before its asynchronous operation",
    ),
)

DIFFERENCES = (
    Own(
        "the expected error does not occur: it works here",
        "test_barrier_test_is_rejected|test_stationary_input|test_reduction_fails_on_too_little"
        "|test_swizzled_dimension_dynamic_slice_raises|test_profiler_computes_correct_alloc"
        "|test_collapsing_several_non_unit_tiled_dimensions_raises|test_permuted_mesh",
        "(ValueError|NotImplementedError) not raised",
    ),
    Own(
        "the expected error does not occur, and the kernel is an endless loop",
        "test_while_loop_layout_mismatch",
        "TimeLimit",
    ),
    Own(
        "the error is raised with another message or type",
        "test_emit_with_empty_grid|test_errors_when_closing_over_array|test_non_scalar_load_raises"
        "|test_inline_mgpu_in_warp_rejects_non_scalar|test_poison_buffers_nyi",
        "does not match",
    ),
    Own(
        "the error is raised with another message or type",
        "test_mlir_error_includes_mlir_error_callsites",
        "CompilationError: .* invalid MLIR",
    ),
    Own(
        "the test looks at JAX's compiler, or at how it calls a kernel",
        "test_cond_get_arch|test_missing_primitive_lowerings_are_tracked|test_griddepcontrol_multi"
        "|SemaphoreTest|test_basic|test_lowering|test_with_profiler",
        "'get_arch' to have been called|KeyError: .*LoweringSemantics|'define void @kernel_"
        "|output_operand_alias|not found in 'module @jit_",
    ),
    Own(
        "programs for the CPU, or for several devices without a mesh, cannot be lowered here",
        "test_export_succeeds|test_lower_with_abstract_mesh|test_ragged_dot_shard_map_check_vma",
        "host_callbacks|device assignment",
    ),
    Own(
        "reads and writes behind the ends of arrays",
        "test_copy_gmem_to_smem_clamped_arrivals1",
        "accesses memory out of bounds",
    ),
    Own(
        "the test calls what JAX 0.11.2 no longer has",
        "test_copy_gmem_to_smem_cp_async",
        "unexpected keyword argument 'impl'",
    ),
    Own("mma of int4 is not supported", "test_mma5", "there is no mma for these operands"),
    Own(
        "the test removes the folder of profiles before it waits for the kernel",
        "test_remote_dma_with_profiler",
        "Directory not empty",
    ),
)


def failure(test: str, text: str, *, ours: bool = False) -> str | None:
    """Why a test fails, if that is JAX's own; ``text`` is what it says."""
    return _why(DIFFERENCES if ours else FAILURES, test, text)


def finding(test: str, text: str, *, ours: bool = False) -> str | None:
    """Why the sanitizer finds something, if that is JAX's own."""
    return _why(FINDINGS + (FINDINGS_HERE if ours else FINDINGS_OF_JAX), test, text)


def findings(text: str) -> list[str]:
    """The findings that an error lists, if it is the sanitizer's."""
    begin = re.search(r"the sanitizer found \d+ errors? in kernel", text)
    return [] if begin is None else re.split(r"\n  \d+\. ", text[begin.start() :])[1:]


def _why(known: tuple[Own, ...], test: str, text: str) -> str | None:
    method = test.rpartition(".")[2]
    for one in known:
        if re.search(one.tests, method) and re.search(one.text, text):
            return one.why
    return None
