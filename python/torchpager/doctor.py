"""``python -m torchpager doctor``: what this machine supports, and what to do about each no.

Works without the extension, and without torch: it is there to say that they are missing.
"""

import argparse
import ctypes.util
import importlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchpager import _compat, hostmem
from torchpager.sizes import format_size


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool | None
    """None: neither good nor bad, or not known."""
    found: str
    advice: str = ""
    """What to do, when it is not ok."""


@dataclass(frozen=True)
class Report:
    """What the machine supports."""

    findings: tuple[Finding, ...]
    simulated: bool
    """Whether torchpager.simulate() can be used."""
    cuda: bool
    """Whether the wrapper door can be used."""

    def as_json(self) -> str:
        """Return the report for programs."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        width = max(len(finding.name) for finding in self.findings)
        marks = {True: "yes", False: "no", None: "-"}
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.name:{width}}  {marks[finding.ok]:3}  {finding.found}")
            if finding.ok is not True and finding.advice:
                lines.append(f"{'':{width}}       -> {finding.advice}")
        lines += [
            "",
            f"CUDA devices: {'ready' if self.cuda else 'not usable'}. "
            f"Simulated device: {'ready' if self.simulated else 'not usable'}.",
        ]
        return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Print what the machine supports.

    Returns
    -------
    int
        0 when torchpager can be used at all, if only on the simulated device; else 1.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torchpager doctor",
        description="Say what this machine supports, and what to do about each no.",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args(argv)
    report = examine()
    print(report.as_json() if args.json else report)
    return 0 if report.simulated or report.cuda else 1


def examine() -> Report:
    """Look at the machine; never raises."""
    torch, torch_finding = _torch()
    build = _build()
    core = _module("_core") if build.ok else None
    probe: dict[str, Any] = core.cuda_probe(0, False) if core is not None else {}
    findings = [
        _system(),
        Finding("Python", sys.version_info >= (3, 10), platform.python_version(), "use 3.10+"),
        torch_finding,
        *_accelerators(torch),
        build,
        *_glue(torch, build),
        *_driver(core, probe),
        _nvml(),
        *_memory(),
    ]
    ready = bool(build.ok)
    simulated = ready and _module("_torch_cpu") is not None and sys.platform == "linux"
    cuda = (
        ready
        and torch is not None
        and _module("_torch_cuda") is not None
        and bool(probe.get("virtual_memory"))
        and bool(torch.cuda.is_available())
    )
    return Report(tuple(findings), simulated, cuda)


def _system() -> Finding:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    linux = sys.platform == "linux"
    return Finding(
        "system",
        linux,
        system,
        "torchpager runs on Linux; on Windows use it inside WSL 2"
        if sys.platform == "win32"
        else "torchpager runs on Linux",
    )


def _torch() -> tuple[Any, Finding]:
    try:
        torch = importlib.import_module("torch")
    except Exception as error:  # a broken installation raises anything
        return None, Finding(
            "torch", False, f"{type(error).__name__}: {error}", "pip install torch"
        )
    return torch, Finding("torch", True, str(torch.__version__))


def _accelerators(torch: Any) -> Iterator[Finding]:
    if torch is None:
        return
    gpu_signs = _gpu_signs()
    yield _cuda_build(torch.version.cuda, gpu_signs)
    if torch.version.cuda is not None:
        usable = bool(torch.cuda.is_available())
        count = torch.cuda.device_count() if usable else 0
        if usable:
            advice = ""
        elif os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"):
            advice = "CUDA_VISIBLE_DEVICES hides every device: unset it"
        elif gpu_signs:
            advice = "there are signs of a GPU: see the driver below, and run nvidia-smi"
        else:
            advice = "nothing to do on a machine without a GPU: use torchpager.simulate()"
        yield Finding(
            "CUDA device",
            usable or (None if not gpu_signs else False),
            f"{count} usable",
            advice,
        )
    if torch.version.hip is not None:
        yield Finding(
            "ROCm",
            False,
            f"torch is built for ROCm {torch.version.hip}",
            "AMD GPUs are not supported; torchpager.simulate() works",
        )
    mps = getattr(torch.backends, "mps", None)
    if mps is not None and mps.is_available():
        yield Finding("MPS", False, "an Apple GPU", "Apple GPUs are not supported")


def _cuda_build(version: str | None, gpu_signs: list[str]) -> Finding:
    """Judge the CUDA version that torch was built with, by whether there is a GPU."""
    if version is not None:
        return Finding("torch with CUDA", True, f"CUDA {version}")
    if not gpu_signs:
        return Finding("torch with CUDA", None, "a CPU build, and no sign of an NVIDIA GPU")
    return Finding(
        "torch with CUDA",
        False,
        f"a CPU build, on a machine with a GPU ({', '.join(gpu_signs)})",
        "pip install --force-reinstall torch "
        "--index-url https://download.pytorch.org/whl/cu130, then build torchpager again",
    )


def _gpu_signs() -> list[str]:
    """Return what on this machine says that there is an NVIDIA GPU."""
    signs = [str(path) for path in sorted(Path("/dev").glob("nvidia[0-9]*"))[:1]]
    if Path("/proc/driver/nvidia/version").exists():
        signs.append("/proc/driver/nvidia")
    if shutil.which("nvidia-smi"):
        signs.append("nvidia-smi")
    if ctypes.util.find_library("cuda"):
        signs.append("libcuda")
    return signs


def _build() -> Finding:
    built = _compat.built_against()
    try:
        _compat.check()
    except ImportError as error:
        return Finding(
            "torchpager's build",
            False,
            "not built" if built is None else f"for torch {built}",
            str(error),
        )
    return Finding("torchpager's build", True, f"for torch {built}")


def _glue(torch: Any, build: Finding) -> Iterator[Finding]:
    if not build.ok:
        return
    for name, what, needed in (
        ("_torch_cpu", "glue for CPU tensors", True),
        ("_torch_cuda", "glue for CUDA tensors", torch.version.cuda is not None),
    ):
        module = _module(name)
        if module is not None:
            yield Finding(what, True, f"for torch {module.TORCH_VERSION}")
        else:
            yield Finding(
                what,
                False if needed else None,
                "not built",
                "build torchpager again, with CUDA's headers installed (cuda-cudart-dev)"
                if needed
                else "it is built when torch has CUDA",
            )


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"torchpager.{name}")
    except ImportError:
        return None


def _driver(core: Any, probe: dict[str, Any]) -> Iterator[Finding]:
    if core is None:
        return
    reason = str(probe.get("reason") or "")
    if not probe.get("library"):
        signs = _gpu_signs()
        yield Finding(
            "CUDA driver",
            False if signs else None,
            reason or "libcuda.so.1 was not found",
            "install NVIDIA's driver, or start the container with access to the GPU"
            if signs
            else "nothing to do on a machine without a GPU: use torchpager.simulate()",
        )
        return
    version = int(probe["driver_version"])
    yield Finding("CUDA driver", True, f"CUDA {version // 1000}.{version % 1000 // 10}")
    if not probe["device_count"]:
        yield Finding(
            "device 0",
            False,
            reason or "the driver shows no device",
            "see nvidia-smi, and CUDA_VISIBLE_DEVICES",
        )
        return
    yield Finding(
        "device 0", True, f"{probe['device_name']}, {format_size(int(probe['total_bytes']))}"
    )
    yield _capability(
        "virtual memory",
        probe["virtual_memory"],
        reason,
        "this device or driver cannot map memory by itself: torchpager cannot be used on it",
    )
    yield _capability(
        "host frames",
        probe["host_frames"],
        reason,
        "needs a newer driver (or a container with access to the NUMA node): without them "
        "bytes in HOST are not mapped, and status() says that P4 is off",
    )
    yield _capability(
        "context-wide marker",
        probe["context_marker"],
        reason,
        "needs a newer driver; without it one event on each stream is recorded instead",
    )


def _capability(name: str, present: object, reason: str, advice: str) -> Finding:
    return Finding(name, bool(present), "" if present else reason, "" if present else advice)


def _nvml() -> Finding:
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return Finding(
            "NVML",
            None,
            "nvidia-ml-py is not installed",
            'pip install nvidia-ml-py, for budget(scope="process")',
        )
    try:
        pynvml.nvmlInit()
        return Finding("NVML", True, str(pynvml.nvmlSystemGetDriverVersion()))
    except Exception as error:  # NVMLError, and OSError where the library is broken
        return Finding("NVML", None, str(error), 'only budget(scope="process") needs it')


def _memory() -> Iterator[Finding]:
    try:
        host = hostmem.read()
    except (OSError, KeyError, ValueError) as error:
        yield Finding("host memory", None, f"cannot be read: {error}")
        return
    cap = host.cap_bytes()
    yield Finding(
        "host memory",
        None,
        f"{format_size(host.ram_bytes)}, available {format_size(host.available_bytes)}",
    )
    yield Finding(
        "control group",
        None,
        "no limit"
        if host.cgroup_room_bytes is None
        else f"leaves {format_size(host.cgroup_room_bytes)}",
    )
    yield Finding(
        "host budget",
        cap > 0,
        f"{format_size(cap)} by default",
        "free some memory, or raise the control group's limit",
    )
