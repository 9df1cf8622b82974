"""What to use where JAX has a primitive that kernels have not."""

from __future__ import annotations

from typing import Any

from pallasite.plugin import MissingRuleError, SourceLocation, plugins
from pallasite.plugin import jax_internals as _jax

_OUTSIDE = "compute it outside of the kernel, and pass the result"
_REMOTE = "use remote references and semaphores, or the collective outside of the kernel"

ALTERNATIVES: dict[str, str] = {
    **dict.fromkeys(
        (
            *("lgamma", "digamma", "igamma", "igammac", "igamma_grad_a", "polygamma", "zeta"),
            *("random_gamma", "bessel_i0e", "bessel_i1e", "regularized_incomplete_beta", "fft"),
            *("cholesky", "eig", "eigh", "lu", "qr", "svd", "schur", "hessenberg"),
            *("triangular_solve", "tridiagonal", "tridiagonal_solve", "householder_product"),
            *("cholesky_update", "lu_pivots_to_permutation", "geqrf"),
            *("geqp3", "ormqr", "symmetric_product", "linear_solve", "random_shuffle"),
            *("select_and_scatter", "select_and_scatter_add", "select_and_gather_add"),
            *("ragged_dot_general", "scaled_dot"),
        ),
        _OUTSIDE,
    ),
    **dict.fromkeys(
        ("psum", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter"), _REMOTE
    ),
    "conv_general_dilated": "add products of shifted windows: acc += x_ref[pl.ds(i, n)] * w[i]",
    **dict.fromkeys(
        ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"),
        "combine shifted slices, or differences of jnp.cumsum",
    ),
    **dict.fromkeys(("complex", "real", "imag", "conj"), "two arrays: real and imaginary parts"),
    "pallasite_kernel": "call the body of the other kernel with references",
    "approx_top_k": "jax.lax.top_k",
    "new_ref": "scratch_types=[plgpu.SMEM(shape, dtype)], pl.run_scoped, or what a loop carries",
    "rng_uniform": "jax.random.uniform with a key of jax.random.key, an operand of the kernel",
    "rng_bit_generator": "jax.random.bits with a key of jax.random.key, an operand of the kernel",
    "atomic_rmw": "plgpu.atomic_add(ref.at[indices], value), and so on, which return nothing",
    "atomic_cas": "plgpu.atomic_max and so on, or a semaphore",
    **dict.fromkeys(
        ("pure_callback", "io_callback", "debug_callback"),
        "pl.debug_print shows values; the host cannot be called from a kernel",
    ),
}
"""Names of primitives without rules, and what does the same."""


_CALLED = {"pallasite_kernel": "call of a kernel"}
"""Names of primitives that no program has written."""


def check_alternatives(equation: Any, caller: SourceLocation | None) -> None:
    """Refuses a primitive that has an alternative, unless a plugin has a rule for it.

    Args:
      equation: of the primitive.
      caller: the user's line around the equation, for one that JAX's own code makes.

    Raises:
      MissingRuleError: with the alternative.
    """
    primitive = equation.primitive
    found = ALTERNATIVES.get(primitive.name)
    if found is not None and not plugins.registry().lowering.rules(primitive):
        raise MissingRuleError(
            f"there is no {_CALLED.get(primitive.name, primitive.name)} in kernels",
            expected="a function of the list in docs/functions.md",
            hint=found,
            location=_jax.user_location(equation.source_info) or caller,
        )
