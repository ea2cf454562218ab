"""Numbers as they are printed: read again, they are the numbers to the digits shown."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from matlens.io.numbers import number_text


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 6))
@example(-7e76, 3)
@example(5e-324, 3)
@example(-1.7976931348623157e308, 0)
@example(0.0005, 3)
@example(999999.9996, 3)
def test_what_is_printed_is_the_number_to_the_digits_shown(number: float, digits: int) -> None:
    text = number_text(number, digits)
    assert len(text) <= 9 + digits
    shown = float(text)
    if "e" in text:
        mantissa, _, exponent = text.partition("e")
        exact = Decimal(mantissa).scaleb(int(exponent))  # the largest numbers round up to what is no float
        assert abs(exact - Decimal(number)) <= Decimal(10).scaleb(int(exponent) - 1) / 2 / 10**digits
        assert 1 <= abs(float(mantissa)) < 10 or digits == 0
        assert len(exponent) >= 3
    else:
        assert abs(shown - number) <= 0.5000001 * 10.0**-digits
    assert (shown == 0) == (number == 0)
    assert math.copysign(1, shown) == math.copysign(1, number)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, "0.000"), (0.5, "0.500"), (-49.31849, "-49.318"), (123456.75, "123456.750"),
        (1e6, "1.000e+06"), (-7e76, "-7.000e+76"), (0.00012, "1.200e-04"), (3, "3.000"),
        (math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_numbers_are_short_and_keep_their_exponent(number: float, text: str) -> None:
    assert number_text(number) == text
