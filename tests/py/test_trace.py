"""Traces: reading them, and the step that stands for the program."""

import gzip
import json
from pathlib import Path

import pytest

import torchpager
from torchpager.trace import Step, StepBlock

TRACES = Path(__file__).resolve().parents[2] / "benchmarks/traces"
BOUNDS = json.loads((TRACES / "bounds.json").read_text())
MIB = 1 << 20

SMALL = """\
l 1 8388608
l 2 100
m step 0
m phase forward
o mm 10.0 0 r 1 w 3
a 3 4194304
o outer 1.5 5 r 3 w 5
o inner 20.0 9 r 3 w 5
a 4 2097152
f 4 2097152
a 5 4194304
f 3 4194304
m phase backward
o add 5.0 20 r 5 1 w 1
f 5 4194304
m end
"""


def load(tmp_path: Path, text: str):
    path = tmp_path / "some.trace"
    path.write_text(text)
    return torchpager.load_trace(path)


def times(step: Step) -> list[tuple[str, int]]:
    return [(each.name, each.device_ns) for each in step.operators]


@pytest.mark.parametrize("key", BOUNDS)
def test_recorded_trace_has_the_shared_figures(key):
    trace = torchpager.load_trace(TRACES / f"{key.removesuffix('+chunk')}.trace.gz")
    assert trace.name == key.removesuffix("+chunk")
    assert trace.peak_bytes == BOUNDS[key]["peak_bytes"]
    whole = trace.step(chunk_bytes=None)
    assert whole.device_ns / 1e6 == pytest.approx(BOUNDS[key]["native_ms"], abs=0.002)
    step = trace.step()
    assert step.device_ns == pytest.approx(whole.device_ns, rel=1e-6)
    assert step.peak_bytes <= whole.peak_bytes == trace.peak_bytes


def test_plain_text_and_gzip_read_the_same(tmp_path):
    plain = load(tmp_path, SMALL)
    packed = tmp_path / "some.trace.gz"
    packed.write_bytes(gzip.compress(SMALL.encode()))
    again = torchpager.load_trace(packed)
    assert again.events == plain.events
    assert again.name == plain.name == "some"


def test_operator_stands_behind_the_allocations_of_its_outputs(tmp_path):
    step = load(tmp_path, SMALL).step()
    # The nameless one keeps block 4's allocation and free apart.
    assert times(step) == [
        ("mm", 10000),
        ("", 0),
        ("outer", 1500),
        ("inner", 20000),
        ("add", 5000),
    ]
    assert step.blocks == (
        StepBlock(8 * MIB, None, None),
        StepBlock(100, None, None),
        StepBlock(4 * MIB, 0, 3),
        StepBlock(2 * MIB, 1, 1),
        StepBlock(4 * MIB, 2, 4),
    )
    assert step.live_bytes == (
        12 * MIB + 100,
        14 * MIB + 100,
        *[16 * MIB + 100] * 2,
        12 * MIB + 100,
    )
    assert [each.phase for each in step.operators] == ["forward"] * 4 + ["backward"]
    assert step.operators[-1].reads == (4, 0)
    assert step.operators[-1].writes == (0,)


def test_like_operators_take_the_lower_median(tmp_path):
    lines = ["l 1 4096", "m step 0"]
    lines += [f"o add {us} 0 r 1 w 1" for us in (9.0, 1.0, 4.0, 6.0)]
    lines += ["m phase backward", "o add 100.0 0 r 1 w 1", "m end"]
    step = load(tmp_path, "\n".join(lines)).step()
    assert [ns for _, ns in times(step)] == [4000] * 4 + [100000]


def step_lines(names: str) -> list[str]:
    return ["m step 0", *(f"o {name} 10.0 0 r 1 w 1" for name in names)]


def test_last_step_stands_for_a_program_that_repeats(tmp_path):
    lines = ["l 1 4096", *step_lines("abcdefghijkx"), *step_lines("abcdefghijk"), "m end"]
    assert len(load(tmp_path, "\n".join(lines)).step().operators) == 11


def test_all_steps_stand_for_a_program_whose_steps_differ(tmp_path):
    lines = ["l 1 4096", *step_lines("abcd"), *step_lines("abef"), "m end"]
    assert len(load(tmp_path, "\n".join(lines)).step().operators) == 8


def test_blocks_that_last_have_one_index_in_every_step(tmp_path):
    lines = ["l 9 4096", "l 5 2000", "m step 0", "o mm 10.0 0 r 9 w 2", "a 2 700"]
    lines += ["m step 1", "o mm 10.0 0 r 9 w 5", "o mm 10.0 0 r 2 w 9", "m end"]
    first, second = load(tmp_path, "\n".join(lines)).steps()
    assert [each.size_bytes for each in first.blocks] == [2000, 4096, 700]
    assert [each.size_bytes for each in second.blocks] == [2000, 4096, 700]
    assert first.operators[0].reads == second.operators[0].reads == (1,)
    assert second.operators[0].writes == (0,)
    assert second.operators[1].reads == (2,)


def test_storage_that_replaces_its_like_lives_across_the_boundary(tmp_path):
    one = "o backward 5.0 0 r 1 w {new}\na {new} 4194304\no optimizer 5.0 0 r {new} w 1\n"
    text = "l 1 4096\nl 2 4194304\nm step 0\no zero 1.0 0 r 2 w 2\nf 2 4194304\n"
    text += one.format(new=3) + "m end\n"
    step = load(tmp_path, text).step()
    assert step.blocks == (StepBlock(4096, None, None), StepBlock(4 * MIB, 1, 0))
    assert step.live_bytes == (4 * MIB + 4096,) * 3
    assert step.operators[0].reads == (1,)


def foreach(tmp_path: Path, sizes: list[int], chunk_bytes: int | None) -> Step:
    """Two operators over lists with temporaries, as a foreach optimizer makes them."""
    count = len(sizes)
    params, states = range(count), range(100, 100 + count)
    temporaries = range(200, 200 + count)
    lines = [
        f"l {ident} {size}" for ident, size in zip([*params, *states], sizes * 2, strict=True)
    ]
    ids = {
        name: " ".join(map(str, each))
        for name, each in (("p", params), ("s", states), ("t", temporaries))
    }
    lines += ["m step 0", "o aten::mul 7.0 0 r 0 w 0"]
    lines += [f"o aten::_foreach_sqrt. 30.0 0 r {ids['s']} w {ids['t']}"]
    lines += [f"a {ident} {size}" for ident, size in zip(temporaries, sizes, strict=True)]
    lines += [f"o aten::_foreach_addcdiv_. 60.0 0 r {ids['s']} {ids['t']} w {ids['p']}"]
    lines += [f"f {ident} 0" for ident in temporaries]
    lines += ["o aten::mul 7.0 0 r 0 w 0", "m end"]
    return load(tmp_path, "\n".join(lines)).step(chunk_bytes=chunk_bytes)


def test_lists_go_through_a_run_of_operators_in_chunks(tmp_path):
    whole = foreach(tmp_path, [MIB, 2 * MIB, 3 * MIB], None)
    step = foreach(tmp_path, [MIB, 2 * MIB, 3 * MIB], 3 * MIB)
    chunk = ["aten::_foreach_sqrt.", "aten::_foreach_addcdiv_."]
    assert [each.name for each in step.operators] == ["aten::mul", *chunk, *chunk, "aten::mul"]
    assert [each.device_ns for each in step.operators] == [
        7000,
        15000,
        30000,
        15000,
        30000,
        7000,
    ]
    assert len(step.operators[1].reads) == 2
    assert step.operators[3].reads == (5,)  # the third state, after three parameters
    # A chunk's temporaries live for that chunk only.
    temporaries = step.blocks[6:]
    assert [(each.born, each.dead) for each in temporaries] == [(1, 2), (1, 2), (3, 4)]
    assert step.peak_bytes == 15 * MIB
    assert whole.peak_bytes == 18 * MIB


def test_short_lists_are_left_whole(tmp_path):
    sizes = [MIB, 2 * MIB]
    assert times(foreach(tmp_path, sizes, 3 * MIB)) == times(foreach(tmp_path, sizes, None))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("l 1", "line 1"),
        ("l 1 -5", "-5 bytes"),
        ("l 1 5\na 1 5", "line 2: storage 1 appears twice"),
        ("f 1 5", "storage 1 is not alive"),
        ("l 1 5\nf 1 5\nf 1 5", "line 3: storage 1 is not alive"),
        ("o add 1.0 0 r 1", "operands"),
        ("o add nan 0 r w", "times"),
        ("o add 1.0 0 w", "operands"),
        ("hello", "'hello' is not an event"),
        ("l 1 5\n\n", "line 2"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path, text, says):
    with pytest.raises(ValueError, match=says):
        load(tmp_path, text)


@pytest.mark.parametrize(
    "data", [b"\x1f\x8bnot gzip", gzip.compress(b"l 1 5")[:-6], b"\xff\xfe"]
)
def test_damaged_file_is_refused(tmp_path, data):
    path = tmp_path / "some.trace"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is not a trace"):
        torchpager.load_trace(path)


def test_empty_step_has_one_operator_that_does_nothing(tmp_path):
    step = load(tmp_path, "l 1 5\nm step 0\nm end\n").step()
    assert times(step) == [("", 0)]
    assert step.peak_bytes == 5
