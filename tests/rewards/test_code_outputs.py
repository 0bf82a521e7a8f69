"""Comparing what a program gave with what a test expects."""

import json
import math
from decimal import Decimal

import pytest

from rewards.code_outputs import read_json, same_output, same_value


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        ("3\n", "3", True),
        ("3", "3  \n\n\n", True),
        ("1 2\n3", "1 2  \r\n3\t\n", True),
        ("", "\n", True),
        ("3", "", False),
        ("3", "3\n3", False),
        ("a\n\nb", "a\nb", False),  # an empty line in between counts
        ("\na", "a", False),  # and one before
        ("  *\n ***", "*\n***", False),  # so does a picture's indentation
        ("1 2", "1  2", False),
        ("YES", "yes", False),
        ("0.333333333333", "0.333333", True),  # off by 3.3e-7
        ("0.333333333333", "0.33333", False),  # by 3.3e-6
        ("2000000.5", "2000001.5", True),  # 1 is below 1e-6 of it
        ("2000000.5", "2000003.5", False),
        ("1e10", "10000000000", True),
        ("0.5", ".5", True),
        ("0.0", "-0.0000001", True),
        ("3.0", "3", True),  # the expected token is a decimal
        ("3", "3.0", False),  # an integer is met exactly
        ("1000000000", "1000000001", False),
        ("7", "007", False),
        ("[0.1, 0.3]", "[0.1, 0.30000000000000004]", True),
        ("x=-0.5;", "x=-0.50;", True),
        ("x=-0.5", "y=-0.5", False),
        ("area: 0.5 m2", "area: 0.5000001 m2", True),
        ("v1.20", "v1.2", False),  # part of a word
        ("1.2.30", "1.2.3", False),
        ("0.5 0.5", "0.5", False),
        ("0.5", "0.5 0.5", False),
        ("1.0", "nan", False),
        ("1.0", "inf", False),
        ("1.0", "1e999", False),
        ("1e999", "1e999", True),
        ("1.0", "\u0661.0", False),  # an Arabic digit
        ("1.0", "1_0", False),
    ],
)
def test_outputs(expected, got, same):
    assert same_output(expected, got, 1e-6) is same


def test_the_tolerance_is_the_callers():
    assert same_output("1.0", "1.01", 0.02)
    assert not same_output("1.0", "1.0000001", 0.0)
    assert same_value(1.0, 1.01, 0.02)


@pytest.mark.parametrize(
    ("expected", "got", "same"),
    [
        (3, 3, True),
        (3, 3.0, True),
        (3, 3.0000000001, False),
        (3.0, 3.0000000001, True),
        (3.0, 3, True),
        (3.0, "3.0", False),
        (True, 1, True),
        (1, True, True),
        (0, None, False),
        (None, None, True),
        (False, None, False),
        ("a", "a", True),
        ("1", 1, False),
        ([1, [2.0]], [1, [2.0000001]], True),
        ([1], [1, 1], False),
        ([], {}, False),
        ([1], 1, False),
        ({"a": 1.0}, {"a": 1.0}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        ({"a": 1}, {"b": 1}, False),
        (math.nan, math.nan, True),
        (math.nan, 1.0, False),
        (1.0, math.nan, False),
        (math.inf, math.inf, True),
        (math.inf, 5.0, False),  # not within any share of infinity
        (5.0, math.inf, False),
        (math.inf, -math.inf, False),
        (10**20 + 1, 1e20, False),
        (1.0, 10**400, False),
    ],
)
def test_values(expected, got, same):
    assert same_value(expected, got, 1e-6) is same


def test_integers_too_long_for_int_are_exact():
    assert same_value(10**5000, Decimal(10**5000), 1e-6)
    assert not same_value(10**5000 + 1, Decimal(10**5000), 1e-6)
    assert not same_value(1.0, Decimal(10**5000), 1e-6)


def test_a_value_nested_deeper_than_python_can_call_is_compared_all_the_same():
    deep = other = 0
    for _ in range(100_000):
        deep, other = [deep], [other]
    assert same_value(deep, other, 1e-6)
    assert not same_value(deep, [other], 1e-6)
    while isinstance(deep, list):  # taken apart here: its own end would recurse
        deep, other = deep[0], other[0]


def test_json_from_the_sandbox():
    assert read_json(b'{"value": [1, NaN, 1e999]}')["value"][2] == math.inf
    assert read_json(b"1" * 10_000) == Decimal("1" * 10_000)
    assert read_json(json.dumps({"a": [1, 2.5, None]}).encode()) == {"a": [1, 2.5, None]}
    for junk in (b"", b"{", b"[" * 200_000, b"\xff\xfe", b"one"):
        with pytest.raises(ValueError, match=r".+"):
            read_json(junk)


@pytest.mark.timeout(20)
def test_megabytes_of_hostile_text_are_compared_in_linear_time():
    digits = "1" * 2**20
    assert not same_output(f"0.5 {digits}", f"0.5 {digits}a", 1e-6)
    assert not same_output("0.5", digits + "e" + digits, 1e-6)
    assert not same_output("0.5", "+-." * 2**18, 1e-6)
    assert not same_output("0.5", "\n" * 2**20 + "1", 1e-6)
