"""The hook ``pallasite_translations``: rules that emit a dialect that the core does not translate.

The plugin multiplies complex numbers with the dialect ``complex``.
"""

from __future__ import annotations

import contextlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir

import pallasite
from pallasite import gpu as plgpu
from pallasite.cli import main
from pallasite.plugin import (
    CompilationError,
    PluginError,
    RuleSet,
    Semantics,
    Translation,
    hookimpl,
    jax_internals,
    manager,
)
from pallasite.plugin.ir import ops
from pallasite.plugin.lowering import RegisterArray
from pallasite_simulator import simulate

COMPLEX = "{ float, float }"
OUT = [jax.ShapeDtypeStruct((256,), jnp.float32)] * 2

multiply_p = jax_internals.Primitive("multiply_complex")
multiply_p.multiple_results = True
multiply_p.def_abstract_eval(lambda a, b, c, d: (a, a))
rules = RuleSet()


def emit(name, kind, *operands):
    operation = ir.Operation.create(f"complex.{name}", results=[kind], operands=list(operands))
    return operation.result


@rules.lowering(multiply_p, Semantics.LANE)
def _multiply(ctx, *parts):
    """``(a + bi) * (c + di)`` as real and imaginary part; operands and results are float32."""
    scalar = ir.F32Type.get()
    number = ir.ComplexType.get(scalar)
    results = [[], []]
    for registers in zip(*(part.registers for part in parts), strict=True):
        elements = [[], []]
        for i in range(parts[0].vector_length):
            a, b, c, d = (ops.extract(register, i) for register in registers)
            left, right = emit("create", number, a, b), emit("create", number, c, d)
            product = emit("mul", number, left, right)
            for one, part in zip(elements, ("re", "im"), strict=True):
                one.append(emit(part, scalar, product))
        for one, found in zip(results, elements, strict=True):
            one.append(ops.from_elements(found))
    return [RegisterArray(tuple(one), parts[0].layout, parts[0].dtype) for one in results]


def create(emitter, operation):
    real, imaginary = emitter.typed(operation)
    half = emitter.instruction(f"insertvalue {COMPLEX} undef, {real}, 0")
    emitter.define(operation, COMPLEX, f"insertvalue {COMPLEX} {half}, {imaginary}, 1")


def part(index):
    def translate(emitter, operation):
        (number,) = emitter.typed(operation)
        emitter.define(operation, "float", f"extractvalue {number}, {index}")

    return translate


def multiply(emitter, operation):
    def of(number, index):
        return emitter.instruction(f"extractvalue {number}, {index}")

    left, right = emitter.typed(operation)
    a, b, c, d = of(left, 0), of(left, 1), of(right, 0), of(right, 1)
    ac, bd, ad, bc = (
        emitter.instruction(f"fmul float {one}, {other}")
        for one, other in ((a, c), (b, d), (a, d), (b, c))
    )
    real = emitter.instruction(f"fsub float {ac}, {bd}")
    imaginary = emitter.instruction(f"fadd float {ad}, {bc}")
    half = emitter.instruction(f"insertvalue {COMPLEX} undef, float {real}, 0")
    emitter.define(operation, COMPLEX, f"insertvalue {COMPLEX} {half}, float {imaginary}, 1")


TRANSLATIONS = tuple(
    Translation(operation=f"complex.{name}", translate=function)
    for name, function in (
        ("create", create),
        ("mul", multiply),
        ("re", part(0)),
        ("im", part(1)),
    )
)


class Plugin:
    def __init__(self, translations=TRANSLATIONS, lowering=()):
        self.translations, self.lowering = translations, lowering

    @hookimpl
    def pallasite_translations(self):
        return self.translations

    @hookimpl
    def pallasite_lowering_rules(self):
        return self.lowering


@contextlib.contextmanager
def registered(translations=TRANSLATIONS, lowering=rules.lowering_rules, name="complex"):
    manager().register(Plugin(translations, lowering), name)
    try:
        yield
    finally:
        manager().unregister(name)


def body(a_ref, b_ref, c_ref, d_ref, re_ref, im_ref):
    re_ref[...], im_ref[...] = multiply_p.bind(*(ref[...] for ref in (a_ref, b_ref, c_ref, d_ref)))


def compiled(semantics=plgpu.LoweringSemantics.Lane):
    params = plgpu.CompilerParams(lowering_semantics=semantics)
    kernel = plgpu.kernel(body, out_type=OUT, compiler_params=params)
    return pallasite.compile(kernel, *OUT, *OUT, target="sm_90")


@pytest.mark.parametrize("semantics", list(plgpu.LoweringSemantics), ids=str)
def test_operations_of_another_dialect(semantics):
    with registered():
        kernel = compiled(semantics)
    assert "complex.mul" in kernel.mlir
    a, b, c, d = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    real, imaginary = simulate(kernel, a, b, c, d).outputs
    expected = (a + 1j * b) * (c + 1j * d)
    np.testing.assert_allclose(real, expected.real, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(imaginary, expected.imag, rtol=1e-5, atol=1e-6)


def test_an_operation_without_translation():
    with registered(TRANSLATIONS[1:]), pytest.raises(CompilationError) as error:
        compiled()
    text = str(error.value)
    assert "operation 'complex.create' has no translation to LLVM IR" in text
    assert f"{__file__}:" in text  # The line of the kernel.


def test_an_error_of_a_translation_names_the_line():
    def refuse(emitter, operation):
        raise CompilationError("no complex numbers today")

    mine = Translation(operation="complex.create", translate=refuse)
    with registered((mine, *TRANSLATIONS[1:])), pytest.raises(CompilationError) as error:
        compiled()
    assert f"{__file__}:" in str(error.value) and "no complex numbers today" in str(error.value)


def test_two_translations_of_one_operation():
    again = Translation(operation="complex.re", translate=part(1))
    with (
        registered(),
        registered([again], (), name="other"),
        pytest.raises(PluginError) as error,
    ):
        manager().registry()
    assert (
        "plugins 'complex' and 'other' both register translations of operation 'complex.re'"
        in str(error.value)
    )


def test_operations_that_the_core_translates():
    def add(emitter, operation):
        left, right = emitter.operands(operation)
        emitter.define(operation, left[0], f"fsub {left[0]} {left[1]}, {right[1]}")

    def sums(a_ref, b_ref, out_ref):
        out_ref[...] = a_ref[...] + b_ref[...]

    kernel = plgpu.kernel(sums, out_type=OUT[0])
    a, b = np.random.default_rng(2).standard_normal((2, 256)).astype(np.float32)
    mine = Translation(operation="arith.addf", translate=add)
    with registered([mine], ()), pytest.raises(PluginError) as error:
        pallasite.compile(kernel, a, b, target="sm_90")
    assert (
        "plugins 'pallasite' and 'complex' both register translations of operation 'arith.addf'"
        in str(error.value)
    )
    mine = Translation(operation="arith.addf", translate=add, overrides=("pallasite",))
    with registered([mine], ()):
        made = pallasite.compile(kernel, a, b, target="sm_90")
    np.testing.assert_array_equal(simulate(made, a, b).outputs[0], a - b)


def test_one_may_override_the_other():
    swapped = Translation(operation="complex.re", translate=part(1), overrides=("complex",))
    with registered(), registered([swapped], (), name="other"):
        kernel = compiled()
    a, b, c, d = np.random.default_rng(1).standard_normal((4, 256)).astype(np.float32)
    real, imaginary = simulate(kernel, a, b, c, d).outputs
    np.testing.assert_array_equal(real, imaginary)


def test_they_are_listed(capsys):
    with registered():
        assert main(["plugins", "--json"]) == 0
    rows = {one["name"]: one for one in json.loads(capsys.readouterr().out)["plugins"]}
    assert rows["complex"]["contributes"] == {"lowering rules": 1, "translations": 4}
