"""Build torchpager's extension modules against the PyTorch that is installed.

``torchpager._core`` is plain C and links nothing of torch, CUDA or libpython. ``_torch_cpu``
and ``_torch_cuda`` are the C++ glue, built for one torch minor; ``_torch_cuda`` only where
torch has CUDA. ``torchpager/_build.py``, beside them, says what they were built against.

Environment: TORCHPAGER_NO_CUDA=1 leaves ``_torch_cuda`` out; TORCHPAGER_DEBUG_BUILD=1 switches
the C core's checks on; TORCHPAGER_JOBS bounds the number of compilers that run at once.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = "csrc"
CORE_DIRS = ("base", "device", "memory", "pager")
CORE_BIND = (
    "cores.c",
    "module.c",
    "oom_text.c",
    "plan_py.c",
    "replay.c",
    "replay_py.c",
    "step_py.c",
    "torch_entry.c",
)
CPU_SOURCES = (
    "torch_hook.cpp",
    "torch_collectives.cpp",
    "torch_recompute.cpp",
    "torch_recompute_table.cpp",
    "torch_announced.cpp",
    "torch_cpu.cpp",
)
CUDA_SOURCES = ("torch_cuda.cpp",)

# Virtual functions of the allocator interface, by whether every supported torch has them. A
# name that is in neither set stops the build: a function that is not forwarded would silently
# answer with the base class's default.
FORWARDED = frozenset(
    (
        "allocate",
        "is_simple_data_ptr",
        "raw_deleter",
        "copy_data",
        "initialized",
        "emptyCache",
        "recordStream",
        "getDeviceStats",
        "resetAccumulatedStats",
        "resetPeakStats",
        "getMemoryInfo",
        "raw_alloc",
        "raw_alloc_with_stream",
        "raw_delete",
        "init",
        "getMemoryFraction",
        "setMemoryFraction",
        "getExpandableSegmentSizes",
        "enable",
        "isEnabled",
        "cacheInfo",
        "getBaseAllocation",
        "snapshot",
        "beginAllocateToPool",
        "endAllocateToPool",
        "releasePool",
        "getPoolUseCount",
        "createOrIncrefPool",
        "setUseOnOOM",
        "setNoSplit",
        "checkPoolLiveAllocations",
        "shareIpcHandle",
        "getIpcDevPtr",
        "isHistoryEnabled",
        "recordHistory",
        "recordAnnotation",
        "pushCompileContext",
        "popCompileContext",
        "setUserMetadata",
        "getUserMetadata",
        "attachOutOfMemoryObserver",
        "attachAllocatorTraceTracker",
        "enablePeerAccess",
        "memcpyAsync",
        "getCheckpointState",
        "setCheckpointPoolState",
        "name",
    )
)
FORWARDED_IF_PRESENT = frozenset(
    (
        "markCaptureBegin",
        "markCaptureEnd",
        "getContextForPointer",
        "supportsUserMetadata",
        "annotateMemory",
        "attachOomRejectionObserver",
        "allocateWithAddress",
    )
)
INTERFACE = (
    ("c10/core/Allocator.h", "Allocator"),
    ("c10/core/CachingDeviceAllocator.h", "DeviceAllocator"),
    ("c10/cuda/CUDACachingAllocator.h", "CUDAAllocator"),
)

BUILD_MODULE = '''"""Written by setup.py: what the extension modules were built against."""

TORCH_VERSION = {version!r}
HAS_CUDA = {has_cuda!r}
CUDA_VERSION = {cuda_version!r}


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def check_torch(version: str) -> None:
    """Raise ImportError if the extension modules cannot be loaded into torch ``version``."""
    if _minor(version) != _minor(TORCH_VERSION):
        raise ImportError(
            f"torchpager was built against torch {{TORCH_VERSION}}, but torch {{version}} is "
            "installed. Build it again with this torch: "
            "pip install --no-build-isolation --no-deps --force-reinstall torchpager"
        )
'''


class BuildError(SystemExit):
    """Stops the build with one message."""

    def __init__(self, text: str) -> None:
        super().__init__(f"\ntorchpager cannot be built: {text}\n")


def flag(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


@dataclass(frozen=True)
class Torch:
    """The torch that is built against."""

    version: str  # "2.14.1"
    cuda_version: str | None
    include_dirs: tuple[str, ...]
    library_dir: str
    cxx11_abi: int

    @property
    def include(self) -> Path:
        return Path(self.include_dirs[0])


def find_torch() -> Torch:
    try:
        import torch
    except ImportError as error:
        raise BuildError(
            f"PyTorch is not installed in this environment ({error}). Install it first, then "
            "build without isolation:\n    pip install torch setuptools wheel\n"
            "    pip install --no-build-isolation ."
        ) from None
    package = Path(torch.__file__).parent
    includes = [package / "include", package / "include/torch/csrc/api/include"]
    if not (includes[0] / "ATen/record_function.h").is_file():
        raise BuildError(
            f"this PyTorch ({package}) comes without its C++ headers. Install a wheel from "
            "PyPI or pytorch.org:\n    pip install --force-reinstall torch"
        )
    return Torch(
        version=torch.__version__.split("+")[0],
        cuda_version=torch.version.cuda,
        include_dirs=tuple(str(path) for path in includes),
        library_dir=str(package / "lib"),
        cxx11_abi=int(torch.compiled_with_cxx11_abi()),
    )


def cuda_include_sets(torch_include: Path) -> list[list[Path]]:
    """Where CUDA headers may be, best first; the directories of an entry go together."""
    sets = []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            sets.append([Path(os.environ[variable]) / "include"])
    packages = torch_include.parent.parent / "nvidia"
    sets.append(sorted(packages.glob("*/include")))
    sets.append([Path("/usr/local/cuda/include")])
    nvcc = shutil.which("nvcc")
    if nvcc:
        sets.append([Path(nvcc).resolve().parent.parent / "include"])
    return sets


def find_cuda_includes(torch: Torch) -> list[str]:
    needed = ("cuda_runtime_api.h", "driver_types.h", "crt/host_defines.h")
    for dirs in cuda_include_sets(torch.include):
        if all(any((path / name).is_file() for path in dirs) for name in needed):
            return [str(path) for path in dirs]
    major = str(torch.cuda_version).split(".")[0]
    suffix = "" if int(major) >= 13 else f"-cu{major}"
    extra = f" nvidia-cuda-crt{suffix}" if int(major) >= 13 else ""
    raise BuildError(
        f"this PyTorch uses CUDA {torch.cuda_version}, but the CUDA headers were not found in "
        "CUDA_HOME, /usr/local/cuda or the nvidia-* packages. Install them:\n"
        f"    pip install nvidia-cuda-runtime{suffix}{extra}\n"
        "or set CUDA_HOME, or set TORCHPAGER_NO_CUDA=1 to build for CPU tensors only."
    )


def class_body(text: str, name: str) -> str:
    """The text between the braces of class ``name``."""
    head = re.search(rf"\b(?:class|struct)\s+(?:\w+\s+)?{name}\b[^;{{]*\{{", text)
    if head is None:
        raise BuildError(f"PyTorch's headers do not define class {name} any more")
    depth, start = 1, head.end()
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
    raise BuildError(f"class {name} in PyTorch's headers does not end")


def virtual_names(header: Path, name: str) -> set[str]:
    """Names of the virtual functions that class ``name`` declares, its destructor left out."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", header.read_text(encoding="utf-8"), flags=re.S)
    found = re.findall(r"\bvirtual\b[^;{}()]*?(~?\w+)\s*\(", class_body(text, name))
    return {each for each in found if not each.startswith("~")}


def interface_macros(torch: Torch) -> list[tuple[str, str | None]]:
    """TP_TORCH_HAS_<name> for what this torch has; an error for what is not forwarded."""
    found: set[str] = set()
    for header, name in INTERFACE:
        found |= virtual_names(torch.include / header, name)
    unknown = sorted(found - FORWARDED - FORWARDED_IF_PRESENT)
    if unknown:
        raise BuildError(
            f"the CUDA allocator of torch {torch.version} has functions that this torchpager "
            f"does not forward: {', '.join(unknown)}. Use a newer torchpager, an older torch, "
            "or TORCHPAGER_NO_CUDA=1."
        )
    return [(f"TP_TORCH_HAS_{each}", "1") for each in sorted(found & FORWARDED_IF_PRESENT)]


def core_sources() -> list[str]:
    files = sorted(path for part in CORE_DIRS for path in (ROOT / CSRC / part).glob("*.c"))
    files += [ROOT / CSRC / "tp.c"]
    files += [ROOT / CSRC / "bind" / name for name in CORE_BIND]
    return [str(path.relative_to(ROOT)) for path in files]


def headers(*, of_core: bool) -> list[str]:
    """The headers that the core includes, or those that reach the glue."""
    found = [str(path.relative_to(ROOT)) for path in sorted((ROOT / CSRC).rglob("*.h"))]
    inner = (f"{CSRC}/memory/", f"{CSRC}/pager/")
    shown = tuple(f"{CSRC}/pager/{name}.h" for name in ("plan", "trace", "types"))
    return [each for each in found if of_core or each in shown or not each.startswith(inner)]


def core_extension() -> Extension:
    macros: list[tuple[str, str | None]] = [("NDEBUG", None)]
    if flag("TORCHPAGER_DEBUG_BUILD"):
        macros.append(("TP_DEBUG", "1"))
    return Extension(
        "torchpager._core",
        core_sources(),
        include_dirs=[CSRC],
        define_macros=macros,
        extra_compile_args=[
            "-std=c11",
            "-O2",
            "-fexceptions",
            "-fvisibility=hidden",
            "-pthread",
        ],
        extra_link_args=["-pthread", "-ldl"],
        depends=headers(of_core=True),
        language="c",
    )


def glue_extension(
    name: str,
    sources: tuple[str, ...],
    torch: Torch,
    *,
    macros: list[tuple[str, str | None]],
    include_dirs: list[str],
    libraries: list[str],
) -> Extension:
    system = [
        arg for path in (*torch.include_dirs, *include_dirs) for arg in ("-isystem", path)
    ]
    return Extension(
        f"torchpager.{name}",
        [f"{CSRC}/bind/{source}" for source in sources],
        include_dirs=[CSRC],
        define_macros=[
            ("NDEBUG", None),
            ("TP_TORCH_VERSION", f'"{torch.version}"'),
            ("_GLIBCXX_USE_CXX11_ABI", str(torch.cxx11_abi)),
            *macros,
        ],
        extra_compile_args=["-std=c++20", "-O2", "-g0", "-fvisibility=hidden", *system],
        # torch is imported first, so its libraries are found by name; the core lies beside.
        extra_link_args=["-Wl,-rpath,$ORIGIN"],
        library_dirs=[torch.library_dir],
        libraries=libraries,
        depends=headers(of_core=False),
        language="c++",
    )


class BuildExt(build_ext):
    """Chooses the extensions, compiles their files side by side, links the core first."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.jobs = int(os.environ.get("TORCHPAGER_JOBS", "0")) or os.cpu_count() or 1

    def run(self) -> None:
        self.check_platform()
        torch = find_torch()
        has_cuda = torch.cuda_version is not None and not flag("TORCHPAGER_NO_CUDA")
        common = ["c10", "torch_cpu", "torch", "torch_python"]
        cpu = glue_extension(
            "_torch_cpu", CPU_SOURCES, torch, macros=[], include_dirs=[], libraries=common
        )
        self.extensions = [core_extension(), cpu]
        if has_cuda:
            cuda = glue_extension(
                "_torch_cuda",
                CUDA_SOURCES,
                torch,
                macros=interface_macros(torch),
                include_dirs=find_cuda_includes(torch),
                libraries=["c10_cuda", *common],
            )
            self.extensions.append(cuda)
        for extension in self.extensions:
            extension._full_name = self.get_ext_fullname(extension.name)
            extension._file_name = self.get_ext_filename(extension._full_name)
            extension._links_to_dynamic = False
            extension._needs_stub = False
        super().run()
        if not has_cuda:
            self.remove_stale("torchpager._torch_cuda")
        self.write_build_module(torch, has_cuda)

    def remove_stale(self, name: str) -> None:
        """Remove what an earlier build against another torch has left for ``name``."""
        file = self.get_ext_filename(self.get_ext_fullname(name))
        for path in (Path(self.build_lib) / file, Path(self.get_ext_fullpath(name))):
            path.unlink(missing_ok=True)

    def check_platform(self) -> None:
        if not sys.platform.startswith("linux"):
            raise BuildError(f"torchpager runs on Linux, not on {sys.platform}")
        for variable, usual in (("CC", "gcc"), ("CXX", "g++")):
            command = os.environ.get(variable) or sysconfig.get_config_var(variable) or usual
            program = shlex.split(command)[0]
            if shutil.which(program) is None:
                raise BuildError(
                    f"no compiler: {program} was not found. Install one:\n"
                    "    apt-get install build-essential    (Debian, Ubuntu)\n"
                    "    dnf install gcc gcc-c++            (Fedora, RHEL)"
                )

    def check_cxx20(self) -> None:
        command = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "g++")
        test = [command[0], "-std=c++20", "-x", "c++", "-fsyntax-only", "-"]
        answer = subprocess.run(test, input="int main() {}", capture_output=True, text=True)
        if answer.returncode != 0:
            raise BuildError(f"{command[0]} does not know C++20. Install g++ 11 or newer.")

    def build_extensions(self) -> None:
        self.check_cxx20()
        # Python's own link command may be the C compiler's; the glue needs the C++ one.
        with ThreadPoolExecutor(self.jobs) as pool:
            tasks = {ext.name: self.start_compiling(pool, ext) for ext in self.extensions}
            for ext in self.extensions:
                self.link(ext, [task.result() for task in tasks[ext.name]])

    def start_compiling(self, pool: ThreadPoolExecutor, ext: Extension) -> list[Any]:
        settings = repr((ext.define_macros, ext.extra_compile_args, os.environ.get("CFLAGS")))
        digest = hashlib.sha256(settings.encode()).hexdigest()[:12]
        folder = os.path.join(self.build_temp, f"{ext.name}-{digest}")
        return [pool.submit(self.compile_one, ext, source, folder) for source in ext.sources]

    def compile_one(self, ext: Extension, source: str, folder: str) -> str:
        target = os.path.join(folder, os.path.splitext(source)[0] + ".o")
        inputs = [source, *ext.depends]
        if not self.force and os.path.exists(target):
            built = os.path.getmtime(target)
            if all(os.path.getmtime(each) < built for each in inputs):
                return target
        (made,) = self.compiler.compile(
            [source],
            output_dir=folder,
            macros=ext.define_macros,
            include_dirs=ext.include_dirs,
            extra_postargs=ext.extra_compile_args,
        )
        return str(made)

    def link(self, ext: Extension, objects: list[str]) -> None:
        path = self.get_ext_fullpath(ext.name)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        extra = list(ext.extra_link_args)
        if ext.name == "torchpager._core":
            extra.append(f"-Wl,-soname,{os.path.basename(path)}")
        else:
            objects = [*objects, self.get_ext_fullpath("torchpager._core")]
        self.compiler.link_shared_object(
            objects,
            path,
            libraries=ext.libraries,
            library_dirs=ext.library_dirs,
            extra_postargs=extra,
            build_temp=self.build_temp,
            target_lang=ext.language,
        )

    def build_module_path(self) -> Path:
        return Path(self.get_ext_fullpath("torchpager._core")).parent / "_build.py"

    def write_build_module(self, torch: Torch, has_cuda: bool) -> None:
        path = self.build_module_path()
        text = BUILD_MODULE.format(
            version=torch.version,
            has_cuda=has_cuda,
            cuda_version=torch.cuda_version if has_cuda else None,
        )
        path.write_text(text, encoding="utf-8")

    def get_outputs(self) -> list[str]:
        outputs: list[str] = super().get_outputs()
        return [*outputs, str(Path(outputs[0]).parent / "_build.py")] if outputs else outputs


# The names only mark the package as one with extensions; BuildExt.run chooses what is built.
setup(
    license="Apache-2.0",
    ext_modules=[Extension("torchpager._core", [f"{CSRC}/bind/module.c"])],
    cmdclass={"build_ext": BuildExt},
)
