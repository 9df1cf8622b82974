"""The benchmark of attention's forms: what it draws, and that its reference agrees with ours."""

from __future__ import annotations

import attention_forms
import jax
import pytest
from attention_forms import KINDS, Form

import pallasite

SMALL = {
    "decode": {"lengths": True},
    "tokens": {"q_len": 3, "causal": True, "lengths": True},
    "paged": {"lengths": True, "page_size": 32},
    "narrow": {},
    "decode_window": {"causal": True, "window": 40},
    "cross": {"q_len": 70},
    "documents": {"batch": 1, "q_len": 160, "documents": 5, "causal": True},
    "alibi": {"q_len": 160, "bias": "alibi", "causal": True},
    "bias": {"q_len": 160, "bias": "each"},
    "mla": {"q_len": 160, "group": 1, "head_dim": 96, "causal": True},
    "vmap": {"q_len": 160, "group": 1},
    "blocks": {"q_len": 160, "seen": 0.3},
    "dropout": {"q_len": 160, "dropout": 0.3},
}


def test_forms_of_a_seed():
    """The same whenever they are drawn, of all kinds; others of another seed."""
    forms = attention_forms.draw(3, 2 * len(KINDS))
    assert [one.kind for one in forms] == [*KINDS, *KINDS]
    assert forms[: len(KINDS)] == attention_forms.draw(3, len(KINDS))
    assert all(one.fits() and one.q_len <= one.kv_len or one.kind == "cross" for one in forms)
    assert forms != attention_forms.draw(4, 2 * len(KINDS))


@pytest.mark.runs_kernels
@pytest.mark.parametrize("kind", SMALL)
def test_results(kind):
    """Ours are those that the benchmark expects, and others are not."""
    sizes = {"batch": 2, "q_len": 1, "kv_len": 160, "kv_heads": 2, "group": 2, "head_dim": 64}
    form = Form(kind, **sizes | {"v_dim": 64} | SMALL[kind])
    arrays = attention_forms.drawn(form, jax.random.key(0)) | attention_forms.host_arrays(form)
    own = attention_forms.prepared(form, arrays)
    backward = kind in ("bias", "documents", "dropout")
    function = attention_forms.ours(form)
    function = attention_forms.with_gradients(function) if backward else function
    with pallasite.target("sm_90a"):
        results = jax.jit(function)(*attention_forms._arguments(own, backward))
    results = results if backward else [results]
    assert attention_forms.errors(form, backward, arrays, results).max() < 6e-3
    wrong = [one.at[0].multiply(1.1) for one in results]
    assert attention_forms.errors(form, backward, arrays, wrong).min() > 5e-2
