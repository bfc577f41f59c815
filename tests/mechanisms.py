"""Take each mechanism away in turn, and see a test miss it.

``make mechanisms`` runs this. For each row of ``ROWS`` the named test runs twice: with every
mechanism in place, where it must pass, and without one, where it must fail. The table of
docs/testing.md shows the same rows; ``tests/py/test_mechanisms.py`` compares them, and sees
that each rule of ``tp_rule`` has a row.

A rule of the C core is switched off by ``TP_RULES_OFF``, which only the C tests read and only a
build with asserts obeys. What is named in ``TORCHPAGER_TEST_WITHOUT``, a list with commas, is
taken away by pytest's fixtures: in Python, or, for the rules about what may be dropped, through
``_torch_cpu.recompute_rules_off``.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "build" / "c" / "debug"
TIMEOUT_S = 120
PYTEST_FAILED = 1
C_TEST_FAILED = 1


@dataclass(frozen=True)
class Row:
    """One switch, and a test that misses what it switches off."""

    mechanism: str
    switch: str
    test: str
    """``program::test`` of tests/c, or a path of pytest."""
    off_in_both: tuple[str, ...] = ()
    """Rules that are off in both runs, for they would make good what the switch loses."""

    @property
    def in_c(self) -> bool:
        """Whether the switch is a rule of the C core."""
        return self.switch.startswith("TP_RULE_")

    @property
    def of_recompute(self) -> bool:
        """Whether it is a rule about what may be dropped."""
        return self.switch.startswith("kRule")


_SCHEDULES = "test_core::tight_schedules_agree_with_the_model"
_PROOF = ("TP_RULE_FINGERPRINT",)
_DROPS = "tests/py/test_recompute_rules.py::"
_TRIAL = ("kRuleTrial",)
_COUNTED = ("kRuleCounted",)

ROWS: tuple[Row, ...] = (
    Row("last-use markers", "TP_RULE_WRITE_BACK_ORDER", _SCHEDULES, _PROOF),
    Row("context-wide markers", "TP_RULE_CONTEXT_MARKER", _SCHEDULES),
    Row("pins", "TP_RULE_PIN", _SCHEDULES),
    Row(
        "waiting rules",
        "TP_RULE_WAITING_PINS",
        "test_core::evicted_block_is_read_where_it_is_and_comes_back",
    ),
    Row(
        "waiting rules",
        "TP_RULE_TICKET",
        "test_mechanisms::operators_that_fit_one_at_a_time_do_not_keep_frames_from_each_other",
    ),
    Row(
        "remap gate",
        "TP_RULE_GATE",
        "test_core::region_of_another_thread_keeps_the_gate_closed",
    ),
    Row(
        "remap gate",
        "TP_RULE_REGION_WAIT",
        "test_core::gate_opens_for_a_wait_only_behind_what_its_region_has_launched",
        _PROOF,
    ),
    Row("remap gate", "TP_RULE_REGION_WRITES", _SCHEDULES, _PROOF),
    Row("remap gate", "TP_RULE_REGION_ORDER", _SCHEDULES, _PROOF),
    Row("workspaces", "TP_RULE_WORKSPACE", "test_core::unseen_block_is_never_evicted"),
    Row(
        "fingerprints",
        "TP_RULE_FINGERPRINT",
        "test_proof::blind_write_to_a_clean_block_is_found_before_its_eviction",
    ),
    Row("fingerprints", "TP_RULE_WRITTEN_MEANWHILE", _SCHEDULES, _PROOF),
    Row("fill events", "TP_RULE_FILL_ORDER", "test_core::fill_waits_for_writes_over_host"),
    Row("fill events", "TP_RULE_FILL_COMPLETE", _SCHEDULES),
    Row(
        "run-ahead limit",
        "TP_RULE_RUN_AHEAD",
        "test_mechanisms::thread_far_ahead_of_the_device_waits_for_memory",
    ),
    Row("capture pins", "TP_RULE_CAPTURE", "test_core::capture_stops_paging_and_defers_frees"),
    Row("second mappings", "TP_RULE_OLD_MAPPING", _SCHEDULES),
    Row("second mappings", "TP_RULE_SAME_STREAM", _SCHEDULES),
    Row(
        "second mappings",
        "TP_RULE_BUSY_FRAME",
        "test_core::frames_of_a_freed_block_wait_for_its_write_back",
    ),
    Row(
        "host cap",
        "TP_RULE_HOST_CAP",
        "test_core::host_budget_is_exact_and_its_end_is_an_error",
    ),
    Row(
        "restore on exit",
        "restore_on_exit",
        "tests/py/test_contexts.py::test_everything_is_as_found_when_contexts_are_left",
    ),
    Row(
        "what may be dropped", "kRuleRandom", _DROPS + "test_random_operators_do_not_run_again"
    ),
    Row(
        "what may be dropped",
        "kRuleStatistics",
        _DROPS + "test_operators_with_statistics_do_not_run_again",
    ),
    Row(
        "what may be dropped",
        "kRuleNotTheSame",
        _DROPS + "test_operators_that_differ_each_time_do_not_run_again",
    ),
    Row(
        "what may be dropped",
        "kRuleTrial",
        _DROPS + "test_operators_that_fail_their_trial_do_not_run_again",
    ),
    Row(
        "what may be dropped",
        "kRuleLeafWrite",
        _DROPS + "test_inputs_that_are_written_do_not_change_what_was_made_of_them",
    ),
    Row("what may be dropped", "kRulePython", _DROPS + "test_what_python_has_keeps_its_bytes"),
    Row(
        "what may be dropped",
        "kRuleHolders",
        _DROPS + "test_what_somebody_unknown_has_keeps_its_bytes",
    ),
    Row(
        "what may be dropped",
        "kRuleRegion",
        _DROPS + "test_what_custom_functions_use_and_make_keeps_its_bytes",
        _COUNTED,
    ),
    Row(
        "what may be dropped",
        "kRuleHooks",
        _DROPS + "test_what_saved_tensor_hooks_were_given_keeps_its_bytes",
        ("kRulePython",),
    ),
    Row(
        "what may be dropped",
        "kRuleAutocast",
        _DROPS + "test_operators_run_again_below_autocast",
        _TRIAL,
    ),
    Row(
        "what may be dropped",
        "kRuleBackward",
        _DROPS + "test_what_a_backward_pass_makes_keeps_its_bytes",
        _COUNTED,
    ),
    Row(
        "what may be dropped",
        "kRuleNumerics",
        _DROPS + "test_operators_run_again_under_the_settings_of_the_first_time",
    ),
    Row(
        "what may be dropped", "kRuleForeign", _DROPS + "test_inputs_that_others_write_are_none"
    ),
    Row(
        "what may be dropped",
        "kRuleSaved",
        _DROPS + "test_what_autograd_has_let_go_of_is_not_taken_for_its_own",
    ),
    Row(
        "what may be dropped",
        "kRuleKernel",
        _DROPS + "test_what_an_operator_saves_before_it_writes_is_not_made_again",
        _COUNTED,
    ),
    Row(
        "what may be dropped",
        "kRuleCounted",
        _DROPS + "test_what_code_has_that_is_not_autograds_keeps_its_bytes",
    ),
)


def rules() -> dict[str, int]:
    """The rules of csrc/pager/types.h and their bits."""
    text = (ROOT / "csrc" / "pager" / "types.h").read_text(encoding="utf-8")
    found = re.findall(r"\b(TP_RULE_\w+)\s*=\s*1\s*<<\s*(\d+)", text)
    return {name: 1 << int(bit) for name, bit in found}


def recompute_rules() -> dict[str, int]:
    """The rules of csrc/bind/torch_recompute.h and their bits."""
    text = (ROOT / "csrc" / "bind" / "torch_recompute.h").read_text(encoding="utf-8")
    found = re.findall(r"\b(kRule\w+) = 1 << (\d+)", text)
    return {name: 1 << int(bit) for name, bit in found}


def _run_c(test: str, off: tuple[str, ...]) -> str:
    program, _, name = test.partition("::")
    bits = sum(rules()[each] for each in off)
    environment = {"TP_SEED": "1"} | os.environ | {"TP_RULES_OFF": str(bits)}
    command = [str(PROGRAMS / program), name]
    done = subprocess.run(
        command, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode == 0:
        return "passed"
    # Dead by a signal: it touched what was not mapped, or an assert found a broken invariant.
    missed = done.returncode == C_TEST_FAILED or done.returncode < 0
    return "failed" if missed else f"error {done.returncode}"


def _run_pytest(test: str, off: tuple[str, ...]) -> str:
    environment = os.environ | {"TORCHPAGER_TEST_WITHOUT": ",".join(off)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        timeout=TIMEOUT_S,
        cwd=ROOT,
        check=False,
    )
    if done.returncode == 0:
        return "passed"
    return "failed" if done.returncode == PYTEST_FAILED else f"error {done.returncode}"


def run(row: Row, *, on: bool) -> str:
    """Run the row's test with or without its mechanism: "passed", "failed", or what else."""
    try:
        off = row.off_in_both + (() if on else (row.switch,))
        return _run_c(row.test, off) if row.in_c else _run_pytest(row.test, off)
    except subprocess.TimeoutExpired:
        return "failed" if not on else "timed out"
    except OSError as error:
        return f"error: {error}"


def main() -> int:
    """Print the table; the exit status says whether every mechanism was missed."""
    parser = argparse.ArgumentParser(description="Take each mechanism away in turn.")
    parser.add_argument("only", nargs="*", help="mechanisms or switches (default: all)")
    only = parser.parse_args().only
    rows = [row for row in ROWS if not only or {row.mechanism, row.switch} & set(only)]
    if not rows:
        parser.error("no mechanism has that name")
    began = time.monotonic()
    tests_on = {(row.test, row.off_in_both): row for row in rows}
    with ThreadPoolExecutor(2) as pool:
        on = {key: pool.submit(run, row, on=True) for key, row in tests_on.items()}
        off = [pool.submit(run, row, on=False) for row in rows]
        found = [
            (row, on[row.test, row.off_in_both].result(), without.result())
            for row, without in zip(rows, off, strict=True)
        ]
    print(f"{'mechanism':21}{'switch':29}{'on':9}{'off':9}test")
    caught = 0
    for row, with_it, without_it in found:
        good = (with_it, without_it) == ("passed", "failed")
        caught += good
        mark = "" if good else "   <-- NOT CAUGHT" if with_it == "passed" else "   <-- BROKEN"
        print(
            f"{row.mechanism:21}{row.switch:29}{with_it:9}{without_it:9}{row.test}{mark}",
        )
    print(f"{caught} of {len(found)} switches are missed ({time.monotonic() - began:.0f}s)")
    return 0 if caught == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
