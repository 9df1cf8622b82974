"""The primitive of products: what JAX's transformations do with one, whatever its dimensions.

It is bilinear, as ``lax.dot_general`` is: its derivatives are products, too, of whatever dimensions
the operands then have, and ``jax.vmap`` adds a dimension to its operands where it is. Which kernel
computes a product is decided when it is traced with the dimensions that it has; the equation keeps
that trace. An epilogue makes one kernel with the product; what it does to derivatives is said by
the primitive of :mod:`pallasite_std.ops.recomputed`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from pallasite.plugin.jax_internals import mapped_result_axis
from pallasite_std.ops.arguments import in_32_bits, matched
from pallasite_std.ops.dense.arrangement import Operands, Run, RunMany, run_product
from pallasite_std.ops.dense.dimensions import Dimensions, Labels, with_batch
from pallasite_std.ops.dense.epilogue import Epilogue
from pallasite_std.ops.dense.problem import MatmulCall
from pallasite_std.ops.recomputed import type_of_result


@dataclasses.dataclass(frozen=True, eq=False)
class Implementation:
    """Functions that compute products.

    Attributes:
      run: one of matrices.
      run_many: several; by default by ``jax.vmap`` of ``run``.
    """

    run: Run
    run_many: RunMany | None = None


@dataclasses.dataclass(frozen=True)
class Product:
    """All of a product that is not an array.

    Attributes:
      implementation: computes it.
      call: dtypes, epilogue and configuration. Extents and orders are those of the operands.
      dims: labels of the operands' dimensions.
    """

    implementation: Implementation
    call: MatmulCall
    dims: Dimensions

    def __call__(self, *operands: jax.Array) -> jax.Array:
        """The product by kernels, without rules for transformations."""
        run, run_many = self.implementation.run, self.implementation.run_many
        return run_product(run, run_many, self.call, self.dims, operands)

    def bind(self, *operands: jax.Array) -> jax.Array:
        """The product, traced for the operands."""
        given = matched(*operands)
        jaxpr = jax.make_jaxpr(self.__call__)(*given)
        result: jax.Array = product_p.bind(*given, product=self, jaxpr=jaxpr)
        return result

    def bind_tangent(self, *operands: jax.Array) -> jax.Array:
        """The same where the equation mostly is but transposed: traced once for such operands."""
        given = matched(*operands)
        jaxpr = _jitted(self).trace(*given).jaxpr
        result: jax.Array = product_p.bind(*given, product=self, jaxpr=jaxpr)
        return result

    def plain(self, dims: Dimensions, out_dtype: Any, *dtypes: Any) -> Product:
        """A product without an epilogue, whose sums are those of derivatives."""
        problem = dataclasses.replace(
            self.call.problem,
            dtype_a=np.dtype(dtypes[0]),
            dtype_b=np.dtype(dtypes[1]),
            out_dtype=np.dtype(out_dtype),
            accumulator=np.dtype(np.float32),
        )
        call = MatmulCall(problem=problem, epilogue=Epilogue(), config=None)
        dims = dataclasses.replace(dims, out=dims.sums, extras=())
        return Product(self.implementation, call, dims)

    def mapped(
        self, places: Sequence[int | None], operands: Sequence[jax.Array]
    ) -> tuple[Product, Operands]:
        """The product with a further dimension, whose position in each operand is given.

        Returns:
          It, and its operands.
        """
        dims = self.dims
        new = max((*dims.a, *dims.b, *dims.out)) + 1
        epilogue = self.call.epilogue
        wanted = None if epilogue.residual else mapped_result_axis()
        plain = epilogue == Epilogue()
        apart = plain and self.implementation.run_many is not None
        found = with_batch(dims, new, places, movable=plain, wanted=wanted, apart=apart)
        given = list(operands[:2])
        for array, place, labels in zip(operands[2:], places[2:], found.extras, strict=True):
            given.append(array if place is None else jnp.moveaxis(array, place, labels.index(new)))
        return dataclasses.replace(self, dims=found), tuple(given)


@functools.lru_cache(maxsize=256)
def _jitted(product: Product) -> Any:
    return jax.jit(product.__call__)


product_p = Primitive("matmul")


def _impl(*operands: Any, product: Product, jaxpr: Any) -> Any:
    del product
    return jaxpr_as_fun(jaxpr)(*operands)[0]


def _abstract_eval(*avals: Any, product: Product, jaxpr: Any) -> Any:
    del product
    return type_of_result(jaxpr, avals)


product_p.def_impl(_impl)
product_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(product_p, mlir.lower_fun(_impl, multiple_results=False))


@in_32_bits
def _batch(
    operands: Sequence[Any], places: Sequence[int | None], *, product: Product, jaxpr: Any
) -> tuple[jax.Array, int]:
    del jaxpr
    found, given = product.mapped(places, operands)
    [new] = set(found.dims.out) - set(product.dims.out)
    return found.bind(*given), found.dims.out.index(new)


batching.primitive_batchers[product_p] = _batch


def derivative(
    product: Product, primals: Sequence[Any], tangents: Sequence[Any], out_dtype: Any
) -> list[jax.Array]:
    """The terms of the derivative of a product without its epilogue; tangents may be zeros."""
    (a, b), (tangent_a, tangent_b), terms = primals, tangents, []
    for left, right in ((tangent_a, b), (a, tangent_b)):
        if not isinstance(left, ad.Zero) and not isinstance(right, ad.Zero):
            one = product.plain(product.dims, out_dtype, left.dtype, right.dtype)
            terms.append(one.bind_tangent(left, right))
    return terms


@in_32_bits
def _transpose(
    cotangent: Any, a: Any, b: Any, *, product: Product, jaxpr: Any
) -> list[jax.Array | None]:
    del jaxpr
    if isinstance(cotangent, ad.Zero):
        return [None, None]
    dims = product.dims
    if ad.is_undefined_primal(a):
        return [transposed(product, dims.a, a.aval.dtype, cotangent, b, dims.b), None]
    return [None, transposed(product, dims.b, b.aval.dtype, cotangent, a, dims.a)]


ad.primitive_transposes[product_p] = _transpose


def transposed(
    product: Product, out: Labels, dtype: Any, cotangent: Any, other: Any, labels: Labels
) -> jax.Array:
    """The cotangent of one operand, from the other one. 8-bit operands are multiplied as bfloat16.

    Args:
      product: whose cotangent it is.
      out: labels of the operand.
      dtype: of the operand.
      cotangent: of the product.
      other: the other operand.
      labels: those of the other operand.
    """
    problem = product.call.problem
    wide = np.dtype(jnp.bfloat16) if problem.size == 1 else problem.dtype_a
    dims = Dimensions(a=product.dims.sums, b=labels, out=out)
    one = product.plain(dims, dtype, wide, wide)
    return one.bind(cotangent.astype(wide), other.astype(wide))
