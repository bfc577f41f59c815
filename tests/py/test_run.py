"""``python -m torchpager run``: a program runs as without it, and its children are armed."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from torchpager import run

SIMULATE = ("--simulate", "64MiB", "--sim-option", "granularity=64KiB")
without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="this machine has a CUDA device"
)


@pytest.fixture
def script(tmp_path):
    """Write a program; returns its path."""

    def write(text, name="program.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def both(run_python, tmp_path):
    """Run a program plain and under ``run``; returns the plain run after comparing the two."""

    def compare(*program, **options):
        options.setdefault("cwd", tmp_path)
        plain = run_python(*program, check=False, **options)
        under = run_python(
            "-m", "torchpager", "run", *SIMULATE, *program, check=False, **options
        )
        assert under.returncode == plain.returncode
        assert under.stdout == plain.stdout
        assert under.stderr == plain.stderr
        return plain

    return compare


SHOW_MAIN = """
    import sys, __main__
    names = dict(vars(__main__))
    print(sys.argv)
    print(sys.path[0])
    print(sorted(name for name in names if name not in ("names", "sys", "__main__")))
    for name in ("__name__", "__file__", "__package__", "__cached__", "__doc__", "__spec__"):
        value = names.get(name)
        print(name, getattr(value, "name", value))
    print(type(names["__loader__"]).__name__, sys.modules["__main__"] is __main__)
    print(sys.orig_argv[1:])
"""


def test_script_sees_what_it_sees_without(both, script):
    path = script(SHOW_MAIN)
    done = both(f"./{path.name}", "--budget", "x", "-m", "--help")
    assert "'--budget', 'x', '-m', '--help'" in done.stdout


def test_linked_script_finds_its_neighbours_and_its_exit_code_passes(both, script, tmp_path):
    script("VALUE = 5\n", "real/neighbour.py")
    path = script(
        "import sys, neighbour\nprint(neighbour.VALUE, sys.path[0])\n", "real/main.py"
    )
    (tmp_path / "link.py").symlink_to(path)
    assert both("link.py").stdout.startswith("5 ")


def test_module_sees_what_it_sees_without(both, script):
    script("", "package/__init__.py")
    script(SHOW_MAIN, "package/tool.py")
    script(SHOW_MAIN, "package/__main__.py")
    assert "package.tool" in both("-m", "package.tool", "-m", "z").stdout
    both("-m", "package")


def test_folder_with_main_runs_and_its_exit_message_passes(both, script):
    text = "import helper, sys\nprint(helper.__name__, __name__)\nsys.exit('a message')\n"
    script(text, "folder/__main__.py")
    script("", "folder/helper.py")
    done = both("folder")
    assert done.stdout == "helper __main__\n"
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("text", "last"),
    [
        (
            "import threading\n"
            "t = threading.Thread(target=lambda: 1 / 0, name='t')\nt.start()\nt.join()\n"
            "def f():\n"
            "    try:\n        1 / 0\n"
            "    except ZeroDivisionError as e:\n        raise KeyError('b') from e\n"
            "f()\n",
            "KeyError: 'b'",
        ),
        ("def broken(:\n    pass\n", "SyntaxError: invalid syntax"),
        (
            "import sys\n"
            "def mine(kind, error, trace):\n"
            "    print('mine', kind.__name__, trace.tb_lineno, file=sys.stderr)\n"
            "sys.excepthook = mine\n"
            "import no_such_module\n",
            "mine ModuleNotFoundError 5",
        ),
    ],
)
def test_traceback_is_the_programs(both, script, text, last):
    assert both(script(text)).stderr.splitlines()[-1] == last


def test_traceback_of_a_module_is_the_modules(both, script):
    script("def f():\n    raise ValueError('deep')\nf()\n", "tool.py")
    assert both("-m", "tool").stderr.endswith("ValueError: deep\n")


def test_handlers_threads_input_and_pickles_of_the_program_work(both, script):
    path = script(
        """
        import atexit, dataclasses, pickle, threading, time, typing
        @dataclasses.dataclass
        class Point:
            x: "int"
        if __name__ == "__main__":
            print(pickle.loads(pickle.dumps(Point(3))), typing.get_type_hints(Point))
        print(input()[::-1], flush=True)
        atexit.register(lambda: print("handler", NAME))
        def late():
            time.sleep(0.3)
            print("thread", NAME)
        NAME = "value"
        threading.Thread(target=late).start()
        """
    )
    done = both(path, input="abc\n")
    assert done.stdout.endswith("cba\nthread value\nhandler value\n")


def test_program_is_inside_the_budget(run_python, script):
    path = script(
        """
        import torch
        kept = [torch.full((1 << 20,), float(i)) for i in range(8)]
        print([t.sum().item() / 2**20 for t in kept])
        import torchpager
        stats = torchpager.stats()
        print(stats.reserved.peak <= 16 << 20, stats.evictions.count > 0)
        print(torchpager.status().budget_bytes, torchpager.status().host_budget_bytes)
        """
    )
    env = os.environ | {"TORCHPAGER_BUDGET": "25%", "TORCHPAGER_HOST_BUDGET": "1 MiB"}
    done = run_python(
        "-m", "torchpager", "run", *SIMULATE, "--host-budget", "30 MiB", path, env=env
    )
    values = [float(i) for i in range(8)]
    assert done.stdout == f"{values}\nTrue True\n{16 << 20} {30 << 20}\n"


def test_no_offload_makes_it_a_hard_cap(run_python, script):
    path = script(
        """
        import torch
        try:
            kept = [torch.ones(1 << 20) for i in range(8)]
        except torch.OutOfMemoryError as error:
            print(str(error).split(".")[0])
        """
    )
    args = ("-m", "torchpager", "run", *SIMULATE, "--no-offload", "--budget", "16MiB", path)
    assert run_python(*args).stdout == "CUDA out of memory\n"


@without_gpu
def test_no_gpu_and_no_simulate_exits_2_with_one_sentence(run_python, script):
    done = run_python("-m", "torchpager", "run", script("print('ran')"), check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "--simulate SIZE" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "a program is missing"),
        (["-m"], "a program is missing"),
        (["--budget"], "expected one argument"),
        (["--budget", "8 GB B", "x.py"], "budget is '8 GB B'"),
        (["--host-budget=-1", "x.py"], "host budget is '-1'"),
        (["--simulate", "0", "x.py"], "device_bytes is '0'"),
        (["--simulate", "1GiB", "--sim-option", "strict", "x.py"], "not NAME=VALUE"),
        (["--simulate", "1GiB", "--sim-option", "color=red", "x.py"], "color is unknown"),
        (["--simulate", "1GiB", "--sim-option", "strict=maybe", "x.py"], "true and false"),
        (["--sim-option", "strict=1", "x.py"], "needs --simulate"),
        (["--no-offload", "x.py"], "nothing to do"),
        (["--unknown", "x.py"], "unrecognized arguments"),
        (["--simulate", "1GiB", "no_such_file.py"], "can't open file"),
        (["--simulate", "1GiB", "--budget", "2GiB", __file__], "larger than the simulated"),
    ],
)
def test_bad_command_line_exits_2_and_says_what_is_wrong(capsys, monkeypatch, args, words):
    monkeypatch.setattr(os, "environ", os.environ.copy())
    try:
        code = run.main(args)
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert words in capsys.readouterr().err


CHILD_REPORT = """
    import importlib.util, sys
    assert importlib.util.find_spec("torch")
    import torch
    from torchpager import status
    print("child", status().budget_bytes, sys.argv[1:], flush=True)
"""


def test_subprocess_is_armed_by_itself(run_python, script):
    child = script(CHILD_REPORT, "child.py")
    path = script(
        f"""
        import subprocess, sys
        subprocess.run([sys.executable, {str(child)!r}, "a"], check=True)
        """
    )
    done = run_python("-m", "torchpager", "run", *SIMULATE, "--budget", "8MiB", path)
    assert done.stdout == f"child {8 << 20} ['a']\n"


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_spawned_process_is_armed_and_finds_main(run_python, script, as_module):
    path = script(
        """
        import multiprocessing
        import torch
        def work(n):
            import torchpager
            x = [torch.full((1 << 20,), float(n)) for _ in range(6)]
            total = sum(t.sum().item() for t in x) / 2**20
            paged = torchpager.stats().evictions.count > 0
            return total, torchpager.status().budget_bytes, paged
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(work, [2]))
        """
    )
    program = ("-m", "program") if as_module else (path,)
    done = run_python(
        "-m", "torchpager", "run", *SIMULATE, "--budget", "8MiB", *program, cwd=path.parent
    )
    assert done.stdout == f"[(12.0, {8 << 20}, True)]\n"


def test_program_that_runs_torchpager_itself_is_armed_once(run_python, script):
    child = script(CHILD_REPORT, "child.py")
    path = script(
        f"""
        import subprocess, sys
        args = ["-m", "torchpager", "run", "--simulate", "32MiB", "--budget", "4MiB"]
        subprocess.run([sys.executable, *args, {str(child)!r}], check=True)
        """
    )
    done = run_python("-m", "torchpager", "run", *SIMULATE, "--budget", "8MiB", path)
    assert done.stdout == f"child {4 << 20} []\n"


def test_child_that_never_imports_torch_is_as_without(run_python, script, tmp_path):
    script("import sys\nsys.stdout.write('customised ')\n", "site/sitecustomize.py")
    code = (
        "import sys; names = [name for name in sys.modules if 'torch' in name]; "
        "print(names, sys.path, sys.modules['sitecustomize'].__file__)"
    )
    path = script(
        f"""
        import subprocess, sys
        subprocess.run([sys.executable, "-c", {code!r}], check=True)
        """
    )
    inherited = filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")])
    env = os.environ | {"PYTHONPATH": os.pathsep.join(inherited)}
    plain = run_python(path, env=env).stdout
    under = run_python("-m", "torchpager", "run", *SIMULATE, path, env=env).stdout
    assert plain.startswith("customised customised [] ")
    assert under == plain


def heed_interrupts():
    """Not as whoever started the tests: a shell's background ignores them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_program_can_be_interrupted(script):
    path = script("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    with subprocess.Popen(
        [sys.executable, "-m", "torchpager", "run", *SIMULATE, path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert "torchpager" not in stderr
