"""Distinct values of integers are those that NumPy finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallasite_simulator.distinct import distinct, distinct_inverse, starts_of


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64])
@given(values=st.lists(st.integers(0, 9) | st.integers(0, 2**31 - 1), max_size=40))
def test_distinct_values(dtype, values):
    array = np.array(values, dtype)
    before = array.copy()
    found, (again, inverse) = distinct(array), distinct_inverse(array)
    expected = sorted(set(values))
    assert found.tolist() == again.tolist() == expected
    assert found.dtype == again.dtype == dtype
    assert [expected[one] for one in inverse.tolist()] == values
    assert [sorted(values)[one] for one in starts_of(np.sort(array)).tolist()] == expected
    np.testing.assert_array_equal(array, before)
