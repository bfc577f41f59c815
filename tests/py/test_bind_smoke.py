"""The extension modules under real PyTorch: CPU door, operator hook, checks of the build."""

import ctypes
import gc
import importlib.util
import os
import shutil
import subprocess
import textwrap
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from torchpager import _build, _core, _torch_cpu

ROOT = Path(__file__).resolve().parents[2]
SLOT = _core.SIM_SLOT
GRANULE = 4096


@contextmanager
def device(*, offload=True, budget=None, strict=False, page_out=False):
    """The simulated device under the CPU door; afterwards nothing may be left of it."""
    _core.sim_open(
        device_bytes=256 << 20,
        granularity=GRANULE,
        large_min=GRANULE,
        extent_max=16 * GRANULE,
        strict=strict,
        page_out_before_op=page_out,
        seed=1,
    )
    _torch_cpu.install(GRANULE)
    try:
        _core.set_offload(SLOT, offload)
        if budget is not None:
            _core.set_budget(SLOT, budget, None)
        yield
        _core.check(SLOT)
        assert [each for each in _core.blocks(SLOT) if each["pin_count"]] == []
    finally:
        _torch_cpu.uninstall()
        gc.collect()
        closed = _core.sim_close()
    assert closed, "blocks of the simulated device are alive"


@pytest.fixture(autouse=True)
def one_thread():
    """Small operators are faster without a pool of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x):
        batch, length, width = x.shape
        heads = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(x)


class Net(nn.Module):
    """Attention, convolution with running statistics, and a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(90, 64)
        self.layers = nn.ModuleList(Layer(64) for _ in range(2))
        self.conv = nn.Sequential(
            nn.Conv1d(64, 64, 3, padding=1), nn.BatchNorm1d(64), nn.ReLU()
        )
        self.rnn = nn.LSTM(64, 64, batch_first=True)
        self.head = nn.Linear(64, 90)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.rnn(x)[0])


def train(steps=2, **adamw):
    """Losses, parameters, buffers and optimizer states of a few steps."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **adamw)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 90, (8, 33))
        scores = model(tokens[:, :-1])
        loss = functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    states = [s for each in optimizer.state.values() for s in each.values()]
    return [*losses, *(p.detach() for p in model.parameters()), *model.buffers(), *states]


def same(left, right):
    return len(left) == len(right) and all(map(torch.equal, left, right))


def copies(tensors):
    return [each.clone() for each in tensors]


# -- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_training_is_bit_equal_when_all_is_paged_out_before_each_operator(kind):
    native = copies(train(**kind))
    with device(strict=True, page_out=True):
        assert same(train(**kind), native)
        assert _core.stats(SLOT)["evictions"][0] > 500


def test_training_is_bit_equal_and_bounded_when_the_budget_is_60_percent():
    native = copies(train())
    with device():
        train()
        gc.collect()
        peak = _core.stats(SLOT)["active"][1]
    with device(budget=peak * 6 // 10):
        assert same(train(), native)
        stats = _core.stats(SLOT)
        assert stats["held"][1] <= peak * 6 // 10
        assert stats["evictions"][0] > 20


def test_four_threads_are_bit_equal_under_a_common_budget():
    def work(number, results):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(96, 96, generator=generator)
        w = torch.randn(96, 96, generator=generator, requires_grad=True)
        for _ in range(30):
            (x @ w).tanh().square().mean().backward()
            with torch.no_grad():
                w -= 0.1 * w.grad
            w.grad = None
        results[number] = w.detach()

    def all_threads():
        results = {}
        threads = [threading.Thread(target=work, args=(n, results)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[n] for n in range(4)]

    native = copies(all_threads())
    with device(budget=600 << 10):
        assert same(all_threads(), native)
        assert _core.stats(SLOT)["evictions"][0] > 0


# -- what an operator touches ------------------------------------------------------------------


def test_function_transforms_touch_the_tensors_inside_their_wrappers():
    x = torch.randn(80, 80)

    def run():
        loss = torch.func.grad(lambda t: ((t * 2).sin() @ t.t()).sum())(x + 0)
        rows = torch.vmap(lambda row: row @ x)(x + 1)
        return [loss, rows]

    native = copies(run())
    with device(strict=True, page_out=True):
        assert same(run(), native)


def test_scripted_function_touches_operands_when_its_stack_is_deeper_than_the_operator():
    @torch.jit.script
    def mixed(a, b):
        return (a.sin() + b.cos() * 2) @ (a - b).tanh() + torch.stack([a, b]).sum(0)

    a, b = torch.randn(64, 64), torch.randn(64, 64)
    native = mixed(a, b).clone()
    with device(strict=True, page_out=True):
        for _ in range(4):  # the interpreter optimises after a few runs
            assert torch.equal(mixed(a + 0, b + 0), native)


def test_sparse_nested_and_quantized_tensors_touch_what_they_are_made_of():
    torch.manual_seed(1)
    dense = torch.randn(100, 100)
    places = torch.randint(0, 100, (2, 3000))
    values = torch.randn(3000)
    scales, zeros = torch.rand(2000) + 0.1, torch.zeros(2000, dtype=torch.long)

    def run():
        sparse = torch.sparse_coo_tensor(places + 0, values + 0, (100, 100)).coalesce()
        rows = (dense + 0).relu().to_sparse_csr()
        nested = torch.nested.nested_tensor([dense[:40] + 0, dense[:70] + 0])
        quantized = torch.quantize_per_channel(
            torch.ones(2000, 4) + 0, scales + 0, zeros + 0, 0, torch.qint8
        )
        return [
            sparse @ (dense + 0),
            (sparse * 2).to_dense(),
            rows @ (dense + 0),
            (nested * 2).to_padded_tensor(0.0),
            quantized.dequantize(),
        ]

    native = copies(run())
    with device(strict=True, page_out=True):
        assert same(run(), native)


def write_raw(tensor, byte):
    """What a kernel does that no schema describes."""
    ctypes.memset(tensor.data_ptr(), byte, tensor.nbytes)


def test_write_of_a_custom_operator_survives_when_its_schema_does_not_declare_it():
    library = torch.library.Library("tp_bind_undeclared", "DEF")
    library.define("fill(Tensor x, Tensor y) -> ()")
    library.impl("fill", lambda _x, y: write_raw(y, 1), "CPU")
    with device(page_out=True):
        x, y = torch.zeros(4096), torch.zeros(4096, dtype=torch.uint8)
        for _ in range(2):  # the first time dirty from birth, then clean after a fill
            y.fill_(7)
            assert int(y.sum()) == 7 * 4096
            torch.ops.tp_bind_undeclared.fill(x, y)
            assert int(y.sum()) == 4096
        del x, y


def test_running_statistics_survive_though_their_write_is_not_declared():
    def run():
        torch.manual_seed(3)
        norm = nn.BatchNorm1d(2048)
        for _ in range(3):
            norm(torch.randn(4, 2048))
        return [norm.running_mean, norm.running_var]

    native = copies(run())
    with device(page_out=True):
        assert same(run(), native)


def test_operator_defined_again_with_another_mutation_is_not_taken_for_the_old_one():
    schemas = ("(Tensor(a!) x, Tensor y) -> ()", "(Tensor x, Tensor(a!) y) -> ()")
    with device(page_out=True):
        pair = [torch.zeros(4096, dtype=torch.uint8) for _ in range(2)]
        for turn in range(40):
            written = turn % 2
            library = torch.library.Library("tp_bind_again", "FRAGMENT")
            library.define(f"write{schemas[written]}")

            def implementation(x, y, byte=turn + 1, target=written):
                write_raw((x, y)[target], byte)

            library.impl("write", implementation, "CPU")
            for each in pair:
                each.add_(0)
                assert int(each.max()) <= 40
            torch.ops.tp_bind_again.write(*pair)
            assert int(pair[written].sum()) == 4096 * (turn + 1)
            library._destroy()
            torch.ops.tp_bind_again.__dict__.pop("write", None)
            torch.ops.tp_bind_again._dir.clear()
        del pair, each


def test_lazy_copy_is_not_copied_by_looking_at_it():
    with device(strict=True, page_out=True):
        source = torch.randn(4096)
        lazy = torch._lazy_clone(source)
        blocks = len(_core.blocks(SLOT))
        assert torch.equal(lazy, source)
        assert len(_core.blocks(SLOT)) == blocks
        lazy.add_(1)
        assert torch.equal(lazy, source + 1)
        del source, lazy


def test_failed_operator_leaves_no_pin():
    with device(page_out=True):
        a, b = torch.randn(64, 64), torch.randn(63, 63)
        for _ in range(3):
            with pytest.raises(RuntimeError):
                torch.mm(a, b)
            with pytest.raises(RuntimeError):
                torch.linalg.cholesky(a - 100 * torch.eye(64))
        assert all(each["pin_count"] == 0 for each in _core.blocks(SLOT))
        assert _core.evict_all(SLOT) >= 0
        del a, b


def test_hook_is_armed_on_cpu_tensors_as_soon_as_offload_is_on():
    # An operator that began before would run on this thread with nobody knowing its operands.
    with device():
        before = _torch_cpu.hook_calls()
        torch.ones(64, 64).sum()
        assert _torch_cpu.hook_calls() > before


def test_hook_is_not_called_without_offload():
    with device(offload=False):
        before = _torch_cpu.hook_calls()
        x = torch.ones(64, 64)
        x @ x + x
        assert _torch_cpu.hook_calls() == before
        _torch_cpu.hook_forced(2)
        try:
            x @ x + x
        finally:
            _torch_cpu.hook_forced(0)
        armed = _torch_cpu.hook_calls()
        assert 3 <= armed - before <= 12  # matmul, mm, add and what they call
        x @ x + x
        assert _torch_cpu.hook_calls() == armed
        del x


# -- the door ----------------------------------------------------------------------------------


def test_out_of_memory_is_torchs_own_error_with_all_figures():
    with device(offload=False, budget=1 << 20):
        kept = torch.ones(100_000)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(4 << 20)
        text = str(caught.value)
        assert text.startswith("CUDA out of memory.")
        for word in (
            "16.00 MiB (16777216 bytes)",
            "Budget 1.00 MiB",
            "resident",
            "HOST",
            "cap",
            "pinned",
            "not adopted",
            "auto_offload",
        ):
            assert word in text, text
        oom = _core.last_oom(SLOT)
        assert oom["requested_bytes"] == 16 << 20
        assert oom["budget_bytes"] == 1 << 20
        assert float(torch.ones(2048).sum()) == 2048.0
        del kept


def test_adopt_moves_the_memory_and_keeps_tensors_views_and_gradients():
    layer = nn.Linear(64, 64)
    layer(torch.ones(2, 64)).sum().backward()
    view = layer.weight.detach()[3]
    before, version = view.clone(), layer.weight._version
    with device(strict=True, page_out=True):
        assert _torch_cpu.adopt(layer.weight) == layer.weight.nbytes
        assert _torch_cpu.adopt(layer.weight) == 0
        assert _torch_cpu.adopt(layer.bias) == 0  # too small
        assert _torch_cpu.is_door_storage(view)
        assert layer.weight._version == version
        assert torch.equal(view, before)
        layer.weight.data.add_(1)
        assert torch.equal(view, before + 1)
        del layer, view


def test_adopt_refuses_memory_that_is_not_pytorchs():
    numpy = pytest.importorskip("numpy")
    with device():
        with pytest.raises(RuntimeError, match="clone"):
            _torch_cpu.adopt(torch.from_numpy(numpy.zeros(4096)))
        with pytest.raises(TypeError):
            _torch_cpu.adopt(3)


def test_blocks_of_either_side_outlive_the_door():
    native = torch.ones(4096)
    with device():
        ours = torch.ones(4096)
        assert _torch_cpu.is_door_storage(ours)
        assert not _torch_cpu.is_door_storage(native)
        with pytest.raises(RuntimeError, match="already"):
            _torch_cpu.install(GRANULE)
        _torch_cpu.uninstall()
        assert not _torch_cpu.installed()
        later = torch.ones(4096)
        assert not _torch_cpu.is_door_storage(later)
        assert not _core.sim_close()
        ours.resize_(8192)
        assert not _torch_cpu.is_door_storage(ours)
        del native, ours
        _torch_cpu.install(GRANULE)
        del later
        assert _core.blocks(SLOT) == []


def test_forked_child_gets_pytorchs_own_allocator():
    with device():
        ours = torch.ones(4096)
        child = os.fork()
        if child == 0:
            mine = torch.empty(4096)
            fine = not _torch_cpu.is_door_storage(mine) and not _torch_cpu.installed()
            del mine, ours
            os._exit(0 if fine else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert _torch_cpu.is_door_storage(torch.empty(4096))
        del ours


def test_forked_child_is_not_watched_whatever_door_is_in_use(run_python):
    """As the workers of a data loader are forked from a process that pages on a GPU."""
    done = run_python(
        "-c",
        "import os, torch\n"
        "from torchpager import _torch_cpu\n"
        "_torch_cpu.hook_forced(2)\n"
        "torch.ones(4) + 1\n"
        "before = _torch_cpu.hook_calls()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    torch.ones(4) + 1\n"
        "    os._exit(_torch_cpu.hook_calls() - before + _torch_cpu.hook_watches())\n"
        "print(before > 0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n",
    )
    assert done.stdout == "True 0\n"


# -- the core module ---------------------------------------------------------------------------


def test_core_error_says_what_failed():
    with pytest.raises(_core.CoreError) as caught:
        _core.stats(SLOT if not _core.is_open(SLOT) else 5)
    assert caught.value.status == "INVALID"
    assert caught.value.oom is None
    with device(), pytest.raises(_core.CoreError) as caught:
        _core.sim_open(
            device_bytes=1 << 20,
            granularity=GRANULE,
            large_min=0,
            extent_max=0,
            strict=False,
            page_out_before_op=False,
            seed=0,
        )
    assert caught.value.status == "BUSY"


def test_pin_beyond_the_budget_raises_with_figures():
    with device(budget=256 << 10):
        tensors = [torch.ones(16 << 10) for _ in range(6)]
        for each in tensors:
            each.add_(1)
        for each in tensors[:4]:
            _core.pin(each.data_ptr())
        with pytest.raises(_core.CoreError) as caught:
            _core.pin(tensors[4].data_ptr())
        assert caught.value.status == "OUT_OF_MEMORY"
        assert caught.value.oom["budget_bytes"] == 256 << 10
        for each in tensors[:4]:
            _core.unpin(each.data_ptr())
        _core.pin(tensors[4].data_ptr())
        _core.unpin(tensors[4].data_ptr())
        del tensors, each


def test_first_paging_calls_back_once_on_the_main_thread():
    calls = []
    _core.on_first_paging(lambda slot: calls.append((slot, threading.current_thread())))
    try:
        with device():
            for _ in range(2):
                x = torch.ones(4096)
                _core.mark_seen(x.data_ptr())
                assert _core.evict_all(SLOT) == 16 << 10
                del x
        for _ in range(1000):
            pass
    finally:
        _core.on_first_paging(None)
    assert calls == [(SLOT, threading.main_thread())]


# -- the build ---------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not installed")
def test_core_exports_only_its_own_names():
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", _core.__file__],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    names = [line.split()[-1] for line in listing.splitlines()]
    assert "tp_torch_malloc" in names
    assert [name for name in names if not name.startswith("tp_")] == ["PyInit__core"]


def test_another_torch_minor_is_refused_with_a_clear_error(run_python):
    with pytest.raises(ImportError, match=r"built against torch .* but torch 2\.1\.0"):
        _build.check_torch("2.1.0")
    _build.check_torch(torch.__version__)
    script = f"""
        import importlib.util, torch
        torch.__version__ = "2.1.0"
        spec = importlib.util.spec_from_file_location(
            "torchpager._torch_cpu", {_torch_cpu.__file__!r})
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            print(error)
    """
    answer = run_python("-c", textwrap.dedent(script)).stdout
    assert "torch 2.1.0 is installed" in answer


@pytest.fixture
def setup_module(monkeypatch):
    """setup.py as a module, with setup() left out."""
    path = ROOT / "setup.py"
    if not path.is_file():
        pytest.skip("not a source checkout")
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    spec = importlib.util.spec_from_file_location("torchpager_setup", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_every_virtual_function_of_the_installed_torch_is_known(setup_module):
    found = setup_module.find_torch()
    macros = dict(setup_module.interface_macros(found))
    assert all(name.startswith("TP_TORCH_HAS_") for name in macros)
    names = setup_module.virtual_names(
        found.include / "c10/cuda/CUDACachingAllocator.h", "CUDAAllocator"
    )
    assert {"raw_alloc", "snapshot", "name"} <= names


def test_build_stops_when_the_allocator_has_an_unknown_virtual_function(setup_module, tmp_path):
    found = setup_module.find_torch()
    for header, _ in setup_module.INTERFACE:
        text = (found.include / header).read_text()
        (tmp_path / header).parent.mkdir(parents=True, exist_ok=True)
        old = "virtual std::string name()"
        (tmp_path / header).write_text(text.replace(old, f"virtual int novel(); {old}"))
    changed = setup_module.Torch("2.99.0", "13.0", (str(tmp_path),), "", 1)
    with pytest.raises(SystemExit, match="does not forward: novel"):
        setup_module.interface_macros(changed)


def test_build_stops_when_cuda_headers_are_missing(setup_module, monkeypatch, tmp_path):
    monkeypatch.setattr(setup_module, "cuda_include_sets", lambda _: [[tmp_path]])
    found = setup_module.Torch("2.14.1", "13.0", (str(tmp_path),), "", 1)
    with pytest.raises(SystemExit, match="pip install nvidia-cuda-runtime nvidia-cuda-crt"):
        setup_module.find_cuda_includes(found)


def test_build_stops_when_torch_is_missing(setup_module, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(SystemExit, match="pip install torch setuptools wheel"):
        setup_module.find_torch()


def test_build_stops_when_no_compiler_is_found(setup_module, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler-at-all")
    setuptools = pytest.importorskip("setuptools")
    command = setup_module.BuildExt(setuptools.Distribution())
    with pytest.raises(SystemExit, match="no-such-compiler-at-all was not found"):
        command.check_platform()
