"""Sizes as people write them."""

import contextlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchpager.sizes import check_size, format_size, kind_of, parse_size

UNITS = {"B": 1} | {
    prefix + infix + "B": base**power
    for power, prefix in enumerate("KMGTP", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1, 1),
        (8 << 30, 8 << 30),
        ("8589934592", 8 << 30),
        ("8 GiB", 8 << 30),
        ("8 GB", 8 * 10**9),
        ("8gib", 8 << 30),
        (" 8\tgB ", 8 * 10**9),
        ("64KiB", 64 << 10),
        ("1.5 MiB", 3 << 19),
        (".5 KiB", 512),
        ("1. KB", 1000),
        ("+3 B", 3),
    ],
)
def test_size_is_bytes_for_every_way_of_writing_it(text, expected):
    assert parse_size(text, name="budget") == expected


@pytest.mark.parametrize(("text", "expected"), [("50%", 500), ("100 %", 1000), ("12.55%", 125)])
def test_percentage_is_of_the_total_when_one_is_known(text, expected):
    assert parse_size(text, name="budget", total_bytes=1000) == expected


def test_percentage_is_refused_when_no_total_is_known():
    with pytest.raises(ValueError, match="percentage"):
        parse_size("50%", name="device_bytes")


@pytest.mark.parametrize(
    "text",
    [
        0,
        -1,
        "0",
        "-8 GiB",
        "0%",
        "-1%",
        "101%",
        "8 GB B",
        "8 GiBs",
        "8 G",
        "",
        "GiB",
        "8,5 GiB",
        "1e9",
        "0x10",
        "inf",
        "nan",
        "8 GiB %",
    ],
)
def test_value_error_says_what_was_asked_and_what_is_possible(text):
    with pytest.raises(ValueError, match=r"^budget is ") as caught:
        parse_size(text, name="budget", total_bytes=1000)
    assert repr(text) in str(caught.value)
    assert "8 GiB" in str(caught.value) or "100%" in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: 1 << 63,
        lambda: 1 << 64,
        lambda: 1 << 20000,
        lambda: -(1 << 64),
        lambda: -(1 << 20000),
        lambda: "8192 PiB",
        lambda: "9" * 5000,
        lambda: "9" * 50,
    ],
)
def test_value_error_for_what_no_machine_can_address(make):
    with pytest.raises(ValueError, match=r"^budget is .*8 GiB") as caught:
        parse_size(make(), name="budget")
    assert len(str(caught.value)) < 500
    assert parse_size((1 << 63) - 1, name="budget") == (1 << 63) - 1


def test_percentage_beyond_100_names_no_total():
    with pytest.raises(ValueError, match=r"^budget is '101%'; .*at most 100%$"):
        check_size("101%", name="budget")


@pytest.mark.parametrize("size", ["50%", "100%", "8 GiB", 5])
def test_check_passes_what_may_be_a_size_once_the_total_is_known(size):
    check_size(size, name="budget")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1, "an int"),
        (1.5, "a float"),
        ((), "a tuple"),
        (Exception(), "an Exception"),
        ("", "a str"),
    ],
)
def test_kind_has_the_right_article(value, words):
    assert kind_of(value) == words


@pytest.mark.parametrize(("zero_allowed", "words"), [(True, "0 bytes"), (False, "1 byte;")])
def test_smallest_size_is_named_in_the_right_number(zero_allowed, words):
    with pytest.raises(ValueError, match=f"at least {words}"):
        parse_size(-1, name="x", zero_allowed=zero_allowed)


@pytest.mark.parametrize("value", [None, True, 8.5, b"8 GiB", ["8 GiB"], {}])
def test_type_error_for_what_is_neither_integer_nor_text(value):
    with pytest.raises(TypeError, match=r"budget is .*possible are"):
        parse_size(value, name="budget")


def test_zero_is_a_size_only_where_it_is_allowed():
    assert parse_size(0, name="host budget", zero_allowed=True) == 0
    assert parse_size("0 B", name="host budget", zero_allowed=True) == 0
    with pytest.raises(ValueError, match="at least 0"):
        parse_size(-1, name="host budget", zero_allowed=True)


@given(
    whole=st.integers(0, 10**6),
    fraction=st.text("0123456789", max_size=12),
    unit=st.sampled_from(sorted(UNITS)),
    upper=st.booleans(),
    blanks=st.text(" \t", max_size=3),
)
def test_parsing_is_exact_for_any_number_and_unit(whole, fraction, unit, upper, blanks):
    number = f"{whole}.{fraction}" if fraction else str(whole)
    text = f"{blanks}{number}{blanks}{unit.upper() if upper else unit.lower()}{blanks}"
    expected = int(Fraction(number) * UNITS[unit])
    if expected < 1 << 63:
        assert parse_size(text, name="x", zero_allowed=True) == expected
    else:
        with pytest.raises(ValueError, match=r"^x is .*2\*\*63"):
            parse_size(text, name="x", zero_allowed=True)


@given(st.integers(1, 1 << 62))
def test_an_integer_survives_as_int_and_as_text(size):
    assert parse_size(size, name="x") == parse_size(str(size), name="x") == size


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_value_error(text):
    with contextlib.suppress(ValueError):
        assert parse_size(text, name="x", total_bytes=1 << 40) >= 1


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "no limit"),
        (0, "0 bytes"),
        (1, "1 byte"),
        (5, "5 bytes"),
        (3 << 19, "1.50 MiB"),
        (1 << 41, "2.00 TiB"),
    ],
)
def test_format_is_readable_for_any_magnitude(size, text):
    assert format_size(size) == text
