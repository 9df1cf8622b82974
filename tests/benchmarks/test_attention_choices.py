"""The benchmark of choices draws shapes for which an estimate decides."""

import attention_choices

from pallasite_hopper.ops.flash.config import default_config


def test_cases_are_those_that_an_estimate_decides():
    for kind in attention_choices.KINDS:
        cases = attention_choices.draw(kind, 3, 2, everywhere=False)
        assert len(cases) == 2 and cases == attention_choices.draw(kind, 3, 2, everywhere=False)
    (case, _) = attention_choices.draw("shared", 3, 2, everywhere=False)

    def split() -> int:
        shape = case.head_dim, case.causal, case.length
        return default_config(*shape, heads=case.batch * case.heads, kv_seq=case.length).split

    assert split() > 1
    with attention_choices.chosen("shared", False):
        assert split() == 1
    (case, _) = attention_choices.draw("divided", 3, 2, everywhere=False)
    first, best = attention_choices._first_and_best(attention_choices._backward_problem(case))
    assert case.causal and (first.parts, first.own_keys) != (best.parts, best.own_keys)
