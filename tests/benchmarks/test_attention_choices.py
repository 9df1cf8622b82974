"""The benchmark of choices draws shapes for which an estimate decides."""

import attention_choices


def test_cases_are_those_that_an_estimate_decides():
    for kind in attention_choices.KINDS:
        cases = attention_choices.draw(kind, 3, 2, everywhere=False)
        assert len(cases) == 2 and cases == attention_choices.draw(kind, 3, 2, everywhere=False)
    (case, _) = attention_choices.draw("tiles", 3, 2, everywhere=False)
    rounds, *others = attention_choices._tiles(case)
    assert attention_choices._default(case) in others
    with attention_choices.chosen("tiles", False):
        assert attention_choices._default(case) == rounds
    (case, _) = attention_choices.draw("tiles", 3, 2, everywhere=True)
    rounds, best, *_ = attention_choices._tiles(case)
    estimate = attention_choices._estimate
    assert estimate(case, best) < 0.95 * estimate(case, rounds)
    (case, _) = attention_choices.draw("divided", 3, 2, everywhere=False)
    first, best = attention_choices._first_and_best(attention_choices._backward_problem(case))
    assert case.causal and (first.parts, first.own_keys) != (best.parts, best.own_keys)
