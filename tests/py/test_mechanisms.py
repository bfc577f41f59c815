"""The list of ``make mechanisms`` is whole, and docs/testing.md shows it."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MECHANISMS = (
    "last-use markers",
    "context-wide markers",
    "pins",
    "waiting rules",
    "remap gate",
    "workspaces",
    "fingerprints",
    "fill events",
    "run-ahead limit",
    "capture pins",
    "second mappings",
    "host cap",
    "restore on exit",
    "what may be dropped",
)

if not (ROOT / "tests" / "mechanisms.py").exists():  # the tests of an installed package
    pytest.skip("the sources are not here", allow_module_level=True)


@pytest.fixture(scope="module")
def mechanisms():
    spec = importlib.util.spec_from_file_location(
        "mechanisms", ROOT / "tests" / "mechanisms.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def documented():
    """The rows of the table: mechanism, switch, test."""
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    part = text.partition("| mechanism | switch |")[2].partition("\n\n")[0]
    for line in part.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        yield cells[0], cells[1].strip("`"), cells[3].strip("`")


def test_table_of_the_documents_is_the_list_that_runs(mechanisms):
    listed = [(row.mechanism, row.switch, row.test) for row in mechanisms.ROWS]
    assert list(documented()) == listed


def test_every_mechanism_and_every_rule_has_a_row(mechanisms):
    assert list(dict.fromkeys(row.mechanism for row in mechanisms.ROWS)) == list(MECHANISMS)
    switches = [row.switch for row in mechanisms.ROWS]
    assert len(set(switches)) == len(switches)
    assert mechanisms.rules().keys() == {row.switch for row in mechanisms.ROWS if row.in_c}
    of_recompute = {row.switch for row in mechanisms.ROWS if row.of_recompute}
    assert mechanisms.recompute_rules().keys() == of_recompute


def test_rules_are_distinct_bits(mechanisms):
    for rules in mechanisms.rules(), mechanisms.recompute_rules():
        bits = list(rules.values())
        assert len(set(bits)) == len(bits) > 10


def test_named_tests_exist(mechanisms):
    for row in mechanisms.ROWS:
        file, _, name = row.test.partition("::")
        if row.in_c:
            text = (ROOT / "tests" / "c" / f"{file}.c").read_text(encoding="utf-8")
            assert f"TEST({name})" in text, row.test
        else:
            text = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", text, re.M), row.test


def test_release_builds_have_no_switches():
    """There the question is a constant, and the environment of the C tests means nothing."""
    text = (ROOT / "csrc" / "pager" / "pager.h").read_text(encoding="utf-8")
    assert "#else\n#define TP_RULE(pager, rule) ((void)(pager), true)\n#endif" in text
    for path in (ROOT / "csrc").rglob("*.[ch]*"):
        assert "TP_RULES_OFF" not in path.read_text(encoding="utf-8"), path
