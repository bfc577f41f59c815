"""The rules of the C sources that a compiler does not check, and proof that each can fail."""

import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
# Includes go down only.
RANK = {"base": 0, "device": 1, "memory": 2, "pager": 3, "tp": 4, "bind": 5}
# Policy: arithmetic over metadata, which no device can be reached from.
PURE = {
    "suballoc",
    "budget",
    "trace",
    "plan",
    "plan_model",
    "plan_drop",
    "plan_rerun",
    "victim",
    "name",
    "record",
    "step",
    "follow",
    "period",
    "steps",
}
FUNCTION_LINES = 80
CONTROL = {"if", "for", "while", "switch", "catch"}

Rule = Callable[[Path], list[str]]


def sources(root: Path) -> Iterator[Path]:
    """Yield the sources and headers, in order."""
    for path in sorted(root.rglob("*")):
        if path.suffix in {".c", ".h", ".cpp"}:
            yield path


def layer(path: Path, root: Path) -> str:
    """Return the layer that a file belongs to."""
    parts = path.relative_to(root).parts
    return parts[0] if len(parts) > 1 else path.stem


def code(path: Path) -> str:
    """Return a file's text with comments and literals blanked, its lines kept."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\''
    text = path.read_text()
    return re.sub(
        pattern, lambda found: "\n" * found[0].count("\n") or " ", text, flags=re.DOTALL
    )


def project_includes(path: Path, root: Path) -> list[Path]:
    """Return the files of this project that a file includes."""
    names = re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), flags=re.MULTILINE)
    found = []
    for name in names:
        for candidate in (path.parent / name, root / name):
            if candidate.exists():
                found.append(candidate.resolve())
                break
    return found


def everything_seen(path: Path, root: Path) -> set[Path]:
    """Return what a file includes, also through other headers."""
    seen: set[Path] = set()
    open_ends = [path]
    while open_ends:
        for included in project_includes(open_ends.pop(), root):
            if included not in seen:
                seen.add(included)
                open_ends.append(included)
    return seen


def includes_that_go_up(root: Path) -> list[str]:
    """Each include must lead to the same layer or one below."""
    return [
        f"{path.relative_to(root)} includes {included.relative_to(root)}"
        for path in sources(root)
        for included in project_includes(path, root)
        if RANK[layer(included, root)] > RANK[layer(path, root)]
    ]


def policy_that_sees_the_device(root: Path) -> list[str]:
    """Policy must not see device.h, not even through another header."""
    device = (root / "device/device.h").resolve()
    return [
        f"{path.relative_to(root)} sees device.h"
        for path in sources(root)
        if path.stem in PURE and device in everything_seen(path, root)
    ]


def out_of_place(pattern: str, allowed: Callable[[str], bool], root: Path) -> list[str]:
    """Name the files whose code matches a pattern though they may not."""
    return [
        f"{name} has {found[0].strip()}"
        for path in sources(root)
        if not allowed(name := path.relative_to(root).as_posix())
        and (found := re.search(pattern, code(path), flags=re.MULTILINE))
    ]


def dlopen_out_of_place(root: Path) -> list[str]:
    """Only the CUDA device loads a library at run time."""
    return out_of_place(r"\bdlopen\s*\(", lambda name: name == "device/device_cuda.c", root)


def mappings_out_of_place(root: Path) -> list[str]:
    """Only the simulated device maps memory of the host."""
    pattern = r"#\s*include\s*<sys/mman\.h>"
    return out_of_place(pattern, lambda name: name == "device/device_sim.c", root)


def frameworks_out_of_place(root: Path) -> list[str]:
    """Only bind sees Python or torch, and only bind holds C++."""
    pattern = r"#\s*include\s*<(Python\.h|torch/|ATen/|c10/|pybind11/)"
    found = out_of_place(pattern, lambda name: name.startswith("bind/"), root)
    found += [
        f"{path.relative_to(root)} is C++"
        for path in sources(root)
        if path.suffix == ".cpp" and layer(path, root) != "bind"
    ]
    return found


def functions(text: str) -> Iterator[tuple[str, int]]:
    """Yield name and number of lines of each function defined in blanked code."""
    ends: dict[int, int] = {}
    stack: list[int] = []
    for position, char in enumerate(text):
        if char == "{":
            stack.append(position)
        elif char == "}" and stack:
            ends[stack.pop()] = position
    head = re.compile(r"\b(\w+)\s*\(([^;{}]*)\)\s*(?:const|noexcept|override|\s)*\{")
    for found in head.finditer(text):
        if found[1] not in CONTROL:
            start = text.rfind("\n", 0, found.start()) + 1
            yield found[1], text.count("\n", start, ends.get(found.end() - 1, start)) + 1


def long_functions(root: Path) -> list[str]:
    """No function has more than 80 lines."""
    return [
        f"{name} in {path.relative_to(root)} has {lines} lines"
        for path in sources(root)
        for name, lines in functions(code(path))
        if lines > FUNCTION_LINES
    ]


def header_failures(root: Path, is_cpp: bool, compiler: list[str]) -> list[str]:
    """Compile each header of one language alone and return what failed."""
    cpp = re.compile(r"^namespace |#\s*include\s*<(c10|ATen|torch)/", flags=re.MULTILINE)
    flags = ["-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{root}"]
    flags.append(f"-I{sysconfig.get_paths()['include']}")
    failed = []
    for path in sources(root):
        if path.suffix != ".h" or bool(cpp.search(path.read_text())) != is_cpp:
            continue
        command = [*compiler, *flags, "-include", str(path), "/dev/null"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        if ran.returncode != 0:
            failed.append(f"{path.relative_to(root)}: {ran.stderr[:400]}")
    return failed


def headers_that_need_others(root: Path) -> list[str]:
    """Each C header compiles alone."""
    return header_failures(root, False, ["gcc", "-std=c11", "-x", "c"])


def glue_headers_that_need_others(root: Path) -> list[str]:
    """Each C++ header compiles alone."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent / "include"
    includes = ["-isystem", str(torch), "-isystem", str(torch / "torch/csrc/api/include")]
    defines = ["-DNDEBUG", '-DTP_TORCH_VERSION="0"']
    return header_failures(root, True, ["g++", "-std=c++20", *defines, *includes, "-x", "c++"])


RULES: list[Rule] = [
    includes_that_go_up,
    policy_that_sees_the_device,
    dlopen_out_of_place,
    mappings_out_of_place,
    frameworks_out_of_place,
    long_functions,
    headers_that_need_others,
    glue_headers_that_need_others,
]
LONG = "\nint f(int x) {\n" + "    x += 1;\n" * FUNCTION_LINES + "    return x;\n}\n"
# What is appended to which file of a copy, and the rule that must object.
OFFENCES: list[tuple[str, str, Rule]] = [
    ("base/bytes.h", '#include "memory/space.h"\n', includes_that_go_up),
    ("pager/pager.h", '#include "tp.h"\n', includes_that_go_up),
    ("memory/budget.h", '#include "device/device.h"\n', policy_that_sees_the_device),
    ("base/bytes.h", '#include "../device/device.h"\n', policy_that_sees_the_device),
    ("base/lock.c", 'void *f(void) { return dlopen("x", 1); }\n', dlopen_out_of_place),
    ("memory/space.c", "#include <sys/mman.h>\n", mappings_out_of_place),
    ("pager/pager.h", "#include <Python.h>\n", frameworks_out_of_place),
    ("base/lock.c", "# include <c10/core/Device.h>\n", frameworks_out_of_place),
    ("base/status.c", LONG, long_functions),
    (
        "base/bytes.h",
        "static inline tp_status f(void) { return 0; }\n",
        headers_that_need_others,
    ),
]


@pytest.mark.smoke
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule) -> None:
    assert rule(CSRC) == []


@pytest.mark.parametrize(("name", "text", "rule"), OFFENCES, ids=lambda value: str(value)[:24])
def test_rule_objects_to_an_offence(tmp_path: Path, name: str, text: str, rule: Rule) -> None:
    copy = tmp_path / "csrc"
    shutil.copytree(CSRC, copy)
    with open(copy / name, "a") as file:
        file.write("\n" + text)
    assert rule(copy) != []


def test_the_rules_see_the_sources() -> None:
    """A checker that looked into an empty folder would find nothing wrong either."""
    names = {path.relative_to(CSRC).as_posix() for path in sources(CSRC)}
    assert {"tp.h", "tp.c", "base/status.c", "device/device_sim.c", "pager/pager.h"} <= names
    found = {name for path in sources(CSRC) for name, _ in functions(code(path))}
    assert {"tp_error_set", "tp_list_push_back"} <= found


@pytest.mark.smoke
def test_core_exports_only_its_own_names() -> None:
    spec = find_spec("torchpager._core")
    assert spec is not None
    assert spec.origin is not None
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", spec.origin],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    names = {line.split()[-1] for line in listed.stdout.splitlines()}
    assert "PyInit__core" in names
    assert {name for name in names if not name.startswith("tp_")} == {"PyInit__core"}


def test_core_links_neither_cuda_nor_torch() -> None:
    spec = find_spec("torchpager._core")
    assert spec is not None
    assert spec.origin is not None
    dynamic = subprocess.run(
        ["readelf", "-d", spec.origin], capture_output=True, text=True, check=True, timeout=60
    )
    needed = re.findall(r"NEEDED.*\[(.+?)\]", dynamic.stdout)
    assert needed
    assert not [name for name in needed if re.match(r"lib(cuda|torch|c10|nv)", name)]
