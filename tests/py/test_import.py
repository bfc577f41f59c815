"""What the package exports, and what its import says when something does not fit."""

import torchpager

EXPORTS = {
    "budget",
    "auto_offload",
    "adopt",
    "pin",
    "simulate",
    "stats",
    "reset_stats",
    "status",
    "step",
    "last_oom",
    "load_trace",
    "roofline",
    "save_trace",
    "pluggable_allocator",
    "testing",
    "UnavailableError",
    "__version__",
}
# A version in the place of the generated file, as if built against another torch.
OTHER_TORCH = (
    "import sys, types\n"
    "build = types.ModuleType('torchpager._build')\n"
    "build.TORCH_VERSION = '1.13.1'\n"
    "sys.modules['torchpager._build'] = build\n"
)
NEVER_BUILT = "import sys\nsys.modules['torchpager._build'] = None\n"


def test_exports_are_exactly_the_documented_ones():
    assert set(torchpager.__all__) == EXPORTS
    assert all(hasattr(torchpager, name) for name in EXPORTS)


def test_every_export_has_a_docstring():
    for name in EXPORTS - {"__version__"}:
        assert getattr(torchpager, name).__doc__


def test_import_raises_import_error_under_another_torch_minor(run_python):
    done = run_python("-c", OTHER_TORCH + "import torchpager\n", check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "ImportError: this build of torchpager is for torch 1.13.1, and torch "
    )
    assert "make build" in last


def test_import_says_how_to_build_when_the_extension_never_was(run_python):
    done = run_python("-c", NEVER_BUILT + "import torchpager\n", check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: torchpager's extension has not been built")
    assert "make build" in last


def test_import_needs_no_optional_package_and_leaves_cuda_alone(run_python):
    done = run_python(
        "-c",
        "import sys\n"
        "for name in ('IPython', 'rich', 'pynvml', 'matplotlib', 'numpy'):\n"
        "    sys.modules[name] = None\n"
        "import torch, torchpager\n"
        "print(torch.cuda.is_initialized(), torchpager.status().active)\n",
    )
    assert done.stdout == "False False\n"


def test_doctor_still_works_when_the_build_is_for_another_torch(run_python, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(OTHER_TORCH)
    done = run_python(
        "-m",
        "torchpager",
        "doctor",
        check=False,
        env=environment_with(tmp_path),
    )
    assert done.returncode == 1
    assert "for torch 1.13.1" in done.stdout
    assert "Traceback" not in done.stderr


def test_run_says_what_is_wrong_when_the_build_is_for_another_torch(run_python, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(OTHER_TORCH)
    done = run_python(
        "-m", "torchpager", "run", "x.py", check=False, env=environment_with(tmp_path)
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "torch 1.13.1" in done.stderr


def environment_with(folder):
    import os

    inherited = os.environ.get("PYTHONPATH", "")
    return os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{inherited}"}
