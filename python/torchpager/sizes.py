"""Sizes as people write them: bytes, ``"8 GiB"``, ``"8 GB"``, ``"50%"``."""

import operator
import re
from typing import SupportsIndex, TypeAlias

Size: TypeAlias = SupportsIndex | str

_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{prefix}{infix}B".upper(): base**power
    for power, prefix in enumerate("KMGTP", start=1)
    for infix, base in (("", 1000), ("i", 1024))
}
_PATTERN = re.compile(r"(?P<sign>[+-]?)(?P<number>\d+(?:\.\d*)?|\.\d+)(?P<unit>[A-Za-z]*|%)")
_POSSIBLE = 'int bytes, "8 GiB" (8 x 2**30), "8 GB" (8 x 10**9)'
# More than any address space holds, and the most that the core's interface takes.
LARGEST_BYTES = (1 << 63) - 1
# Python itself refuses to read or to print numbers of thousands of digits.
_LONGEST_TEXT = 200


def parse_size(
    value: Size, *, name: str, total_bytes: int | None = None, zero_allowed: bool = False
) -> int:
    """Return a size in bytes.

    Parameters
    ----------
    value
        An ``int`` (bytes), or text: a number with an optional unit from B, KB to PB (powers of
        1000) and KiB to PiB (powers of 1024), or a percentage. Case and blanks do not matter.
    name
        What the size is for, used in the errors.
    total_bytes
        What a percentage is taken of. None: percentages are refused.
    zero_allowed
        Whether 0 is a size here.

    Returns
    -------
    int
        Bytes, rounded down.

    Raises
    ------
    TypeError
        The value is neither an integer nor text.
    ValueError
        The text is not a size, or the size is negative, zero, more than 100% or more than
        2**63 - 1 bytes.

    Examples
    --------
    >>> parse_size("1.5 GiB", name="budget")
    1610612736
    >>> parse_size("50%", name="budget", total_bytes=1000)
    500
    """
    possible = _POSSIBLE if total_bytes is None else f'{_POSSIBLE}, "50%"'
    if isinstance(value, bool) or not isinstance(value, str | SupportsIndex):
        raise TypeError(f"{name} is {value!r}, {kind_of(value)}; possible are {possible}")
    if isinstance(value, str):
        size = _parse_text(value, name, total_bytes)
    else:
        size = operator.index(value)
    least = 0 if zero_allowed else 1
    if size < least:
        raise ValueError(
            f"{name} is {_shown(value)}; it must be at least {format_size(least)}; use "
            f"{possible}"
        )
    if size > LARGEST_BYTES:
        raise ValueError(
            f"{name} is {_shown(value)}, more than the 2**63 - 1 bytes that can be addressed; "
            f"use {possible}"
        )
    return size


def check_size(value: Size, *, name: str, zero_allowed: bool = False) -> None:
    """Raise what :func:`parse_size` raises for what is no size, whatever the total is."""
    parse_size(value, name=name, total_bytes=LARGEST_BYTES, zero_allowed=zero_allowed)


def kind_of(value: object) -> str:
    """Return the type of a value with its article, as in "an int", "a float"."""
    kind = type(value).__name__
    return f"{'an' if kind[:1].lower() in ('a', 'e', 'i', 'o') else 'a'} {kind}"


def _shown(value: Size) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= _LONGEST_TEXT else f"{value[:_LONGEST_TEXT]}...")
    size = operator.index(value)
    return (
        str(size) if size.bit_length() <= _LONGEST_TEXT else hex(size)[:_LONGEST_TEXT] + "..."
    )


def _parse_text(text: str, name: str, total_bytes: int | None) -> int:
    compact = "".join(text.split())
    match = _PATTERN.fullmatch(compact) if len(compact) <= _LONGEST_TEXT else None
    possible = _POSSIBLE if total_bytes is None else f'{_POSSIBLE}, "50%"'
    if match is None or (match["unit"] != "%" and match["unit"].upper() not in _UNITS):
        raise ValueError(
            f"{name} is {_shown(text)}, which is not a size; possible are {possible}"
        )
    whole, _, fraction = match["number"].partition(".")
    # Exact arithmetic: a float would round sizes of petabytes, and rounds 0.1 GiB the wrong
    # way.
    digits = int((whole + fraction) or "0")
    scale: int = 10 ** len(fraction)
    sign = -1 if match["sign"] == "-" else 1
    if match["unit"] != "%":
        return sign * (digits * _UNITS[match["unit"].upper()] // scale)
    if total_bytes is None:
        raise ValueError(
            f"{name} is {text!r}, and there is nothing to take a percentage of; "
            f"possible are {possible}"
        )
    if digits > 100 * scale:
        raise ValueError(f"{name} is {text!r}; a percentage may be at most 100%")
    return sign * (total_bytes * digits // (100 * scale))


def format_size(size_bytes: int | None) -> str:
    """Return a size for people, in powers of 1024; None is "no limit"."""
    if size_bytes is None:
        return "no limit"
    size = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            if unit == "bytes":
                return "1 byte" if size_bytes == 1 else f"{size_bytes} bytes"
            return f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
