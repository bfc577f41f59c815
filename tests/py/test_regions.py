"""Code whose kernels nobody sees: right values, and an open gate afterwards."""

import ctypes
import shutil
import sys
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import torchpager
from torchpager import _core, _torch_cpu, regions, testing

KIB = 1 << 10
HOLDS, GATES, LIFTS, NAMES_READS = 1, 2, 4, 8
DEVICE = {"granularity": "4 KiB", "large_min": "16 KiB"}


def figures(name):
    if not _core.is_open(_core.SIM_SLOT):
        return None
    value = _core.stats(_core.SIM_SLOT)[name]
    return value[0] if isinstance(value, tuple) else value


@pytest.fixture(autouse=True)
def one_thread():
    """Keep the order of sums fixed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def paging():
    """Page on the simulated device, with room for 64 tensors of 64 KiB."""
    with (
        torchpager.simulate("64 MiB", seed=5, **DEVICE),
        torchpager.budget("4 MiB"),
        torchpager.auto_offload(),
    ):
        yield
        assert figures("regions_open") == 0
        assert figures("regions_closed") == 0


def floats(tensor):
    """Return the memory of a tensor as ctypes sees it; nobody is told."""
    address = torch._C.TensorBase.data_ptr(tensor)
    return (ctypes.c_float * tensor.numel()).from_address(address)


def blind_triple(source, target):
    """Write three times the source, without any operator."""
    values = floats(source)
    floats(target)[:] = [3 * value for value in values]


class BlindTriple(torch.autograd.Function):
    """Counts its calls in a tensor, too."""

    open_regions = ()

    @staticmethod
    def forward(ctx, x, calls):
        BlindTriple.open_regions += (figures("regions_closed"),)
        out = torch.empty_like(x)
        blind_triple(x, out)
        floats(calls)[0] += 1
        ctx.mark_dirty(calls)
        return out, calls

    @staticmethod
    def backward(_ctx, grad, _):
        BlindTriple.open_regions += (figures("regions_closed"),)
        out = torch.empty_like(grad)
        blind_triple(grad.contiguous(), out)
        return out, None


class Opaque(torch.autograd.Function):
    """Runs a function in its forward pass, and again in its backward pass."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = ctx.run(x)
        torch.autograd.backward(out, grad)
        return None, x.grad


# -- custom functions ----------------------------------------------------------------------


def chain(depth):
    calls = torch.zeros(16 * KIB)
    x = torch.linspace(0, 1, 16 * KIB).requires_grad_()
    y = x
    kept = []
    for _ in range(depth):
        y, calls = BlindTriple.apply(y * 0.25, calls)
        kept.append(y)
    loss = sum((k * k).sum() for k in kept)
    loss.backward()
    return loss.detach().clone(), x.grad.clone(), calls.clone()


def test_blind_kernels_of_a_custom_function_give_the_same_bits():
    plain = chain(10)
    BlindTriple.open_regions = ()
    with (
        torchpager.simulate("64 MiB", seed=3, **DEVICE),
        torchpager.budget("1 MiB"),
        torchpager.auto_offload(),
    ):
        paged = chain(10)
        assert figures("evictions") > 10
        assert figures("regions_closed") == 0
        for expected, got in zip(plain, paged, strict=True):
            assert torch.equal(expected, got)
        assert set(BlindTriple.open_regions) == {1}
        assert len(BlindTriple.open_regions) == 20
        del paged, expected, got


@pytest.mark.usefixtures("paging")
def test_input_of_a_custom_function_counts_as_written():
    calls = torch.zeros(16 * KIB)
    x = torch.ones(16 * KIB)
    testing.evict(calls)
    calls.sum()
    assert testing.state(calls).clean_extents == 1  # the host has the same bytes
    BlindTriple.apply(x, calls)
    assert testing.state(calls).dirty_extents == 1
    testing.evict(calls)
    assert calls[0].item() == 1


@pytest.mark.usefixtures("paging")
def test_whole_block_in_a_custom_function_pages_inside():
    seen = []

    def block(x):
        before = figures("evictions"), figures("regions_closed")
        for _ in range(100):
            x = torch.tanh(x)
            if len(seen) < 2:
                kept.append(x.detach())
        seen.append((before, (figures("evictions"), figures("regions_closed"))))
        return x

    kept = []
    x = torch.linspace(-1, 1, 16 * KIB)
    for run in (Opaque.apply, lambda f, t: checkpoint(f, t, use_reentrant=True)):
        kept.clear()
        seen.clear()
        leaf = x.detach().clone().requires_grad_()
        run(block, leaf).sum().backward()
        (before, after), (before_again, after_again) = seen
        assert after[0] > before[0]
        assert after_again[0] > before_again[0]
        inside = 1 if run == Opaque.apply else 0  # PyTorch's own launches nothing blindly
        assert {before[1], after[1], before_again[1], after_again[1]} == {inside}
        grad = leaf.grad
        plain = x.detach().clone().requires_grad_()
        block(plain).sum().backward()
        assert torch.equal(grad, plain.grad)
    kept.clear()


@pytest.mark.usefixtures("paging")
def test_library_workspace_in_a_region_does_not_become_movable():
    empty_strided = torch._C._dynamo.guards._empty_strided_cpu

    class Allocates(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            # With no operator: as a library allocates.
            Allocates.workspace = empty_strided((16 * KIB,), (1,), torch.float32)
            return x.clone()

    Allocates.apply(torch.ones(16 * KIB))
    address = torch._C.TensorBase.data_ptr(Allocates.workspace)
    assert not _core.block(address)["seen"]
    _core.evict_all(_core.SIM_SLOT)
    assert _core.block(address)["resident_bytes"] == 64 * KIB
    Allocates.workspace = None


@pytest.mark.usefixtures("paging")
def test_exception_in_a_custom_function_opens_the_gate():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, where):
            ctx.where = where
            if where == "forward":
                raise ArithmeticError("forward")
            return x.clone()

        @staticmethod
        def backward(_ctx, _grad):
            raise ArithmeticError("backward")

    x = torch.ones(16 * KIB, requires_grad=True)
    with pytest.raises(ArithmeticError, match="forward"):
        Fails.apply(x, "forward")
    assert figures("regions_open") == 0
    out = Fails.apply(x, "backward").sum()
    with pytest.raises(ArithmeticError, match="backward"):
        out.backward()
    assert figures("regions_open") == 0
    testing.evict(x)


def test_context_left_inside_a_custom_function_leaves_no_region_open():
    class Leaves(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x, context):
            context.stop()
            seen.append(figures("regions_open"))
            return x * 2

    seen = []
    with torchpager.simulate("64 MiB", **DEVICE):
        context = torchpager.auto_offload().start()
        x = torch.ones(16 * KIB)
        testing.evict(x)
        doubled = Leaves.apply(x, context)
        assert seen == [1]
        assert figures("regions_open") == 0
        assert figures("regions_closed") == 0
        assert torch.equal(doubled, torch.full((16 * KIB,), 2.0))
        with torchpager.auto_offload():
            testing.evict(x)
            assert x.sum().item() == 16 * KIB
        del x, doubled


def test_entering_says_nothing_about_fake_tensors():
    with FakeTensorMode():
        fake = torch.ones(16 * KIB)
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with torchpager.simulate("64 MiB", **DEVICE), torchpager.auto_offload():
                pass
    finally:
        torch.set_warn_always(False)
    assert not [str(warning.message) for warning in said]
    del fake


@pytest.mark.usefixtures("paging")
@pytest.mark.parametrize("engine", ["backward", "grad"])
def test_backward_pass_inside_a_region_leaves_the_gate_open(engine):
    def run(x):
        seen.append(figures("regions_closed"))
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = leaf * 2
            out.register_hook(lambda _: seen.append(figures("regions_closed")))
            if engine == "backward":
                out.sum().backward()
            else:
                torch.autograd.grad(out.sum(), leaf)
        seen.append(figures("regions_closed"))
        return x * 1

    seen = []
    Opaque.apply(run, torch.ones(16 * KIB))
    assert seen == [1, 0, 1]


@pytest.mark.usefixtures("paging")
def test_torchscript_is_a_region():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = torch.jit.script(nn.Linear(16, 16))
    before = figures("region_count")
    script(torch.ones(1024, 16))
    assert figures("region_count") > before


@pytest.mark.usefixtures("paging")
def test_generated_nodes_and_profiler_ranges_are_no_regions():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    before = figures("region_count")
    out = checkpoint(model, torch.ones(64, 64, requires_grad=True), use_reentrant=True)
    with torch.autograd.profiler.record_function("mine"):
        out.square().sum().backward()
    assert figures("region_count") == before


# -- announced callables -------------------------------------------------------------------


@pytest.mark.usefixtures("paging")
def test_announced_call_holds_its_tensors_in_place():
    a, b, c = (torch.ones(16 * KIB) for _ in range(3))
    for tensor in (a, b, c):
        testing.evict(tensor)

    def launch(*args, **kwargs):
        states = [testing.state(tensor) for tensor in (a, b, c)]
        assert [state.where for state in states] == ["resident"] * 3
        assert [state.pins for state in states] == [1, 1, 1]
        scratch = torch.empty(16 * KIB)
        assert testing.page_out_all() == 0
        floats(scratch)[0] = 1.0
        return args, kwargs, figures("regions_closed")

    descriptor = type("Descriptor", (), {"base": b})()
    call = _torch_cpu.announced(launch, HOLDS)
    args, kwargs, closed = call(a, 3, descriptor, names=([c], "text"))
    assert args == (a, 3, descriptor)
    assert kwargs == {"names": ([c], "text")}
    assert closed == 0
    assert all(testing.state(tensor).pins == 0 for tensor in (a, b, c))
    _, _, closed = _torch_cpu.announced(launch, HOLDS | GATES)((a, (b, c)))
    assert closed == 1


@pytest.mark.usefixtures("paging")
def test_announced_method_knows_which_arguments_are_only_read():
    read, written = torch.ones(16 * KIB), torch.ones(16 * KIB)
    for tensor in (read, written):
        testing.evict(tensor)
        tensor.sum()

    class Kernel:
        fn = type("Fn", (), {"arg_names": ["in_ptr0", "out_ptr0", "xnumel"]})

        def run(self, _source, _target, count):
            """Launch."""
            return self, count

    Kernel.run = _torch_cpu.announced(Kernel.run, HOLDS | NAMES_READS)
    kernel = Kernel()
    assert kernel.run(read, written, 7) == (kernel, 7)
    assert Kernel.run.__doc__ == "Launch."
    assert Kernel.run.__name__ == "run"
    assert testing.state(read).clean_extents == 1
    assert testing.state(written).dirty_extents == 1


@pytest.mark.usefixtures("paging")
def test_exception_through_an_announced_call_leaves_nothing_behind():
    x = torch.ones(16 * KIB)

    def fail(_tensor):
        raise KeyError("kernel")

    with pytest.raises(KeyError, match="kernel"):
        _torch_cpu.announced(fail, HOLDS | GATES)(x)
    assert testing.state(x).pins == 0
    assert figures("regions_open") == 0
    with pytest.raises(TypeError, match="callable"):
        _torch_cpu.announced(3, HOLDS)


@pytest.mark.usefixtures("paging")
def test_lifted_call_leaves_the_gate_open():
    lifted = _torch_cpu.announced(lambda: figures("regions_closed"), LIFTS)
    gated = _torch_cpu.announced(lambda: (figures("regions_closed"), lifted()), GATES)
    assert gated() == (1, 0)
    assert lifted() == 0


def test_announced_call_outside_paging_is_a_plain_call():
    x = torch.ones(16 * KIB)
    assert not _torch_cpu.hook_watches()
    assert _torch_cpu.announced(lambda t: t, HOLDS | GATES)(x) is x


# -- compiled programs ---------------------------------------------------------------------

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="Inductor needs a C++ compiler"
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(6))
        self.norm = nn.LayerNorm(96)

    def forward(self, x):
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(self.norm(x)))
        return x


def train_compiled(compiled_of, batches):
    torch.manual_seed(3)
    model = Net()
    compiled = compiled_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step, batch in enumerate(batches):
        torch.manual_seed(step)
        x = torch.randn(batch, 96)
        loss = (compiled(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    with torch.no_grad():
        losses.append(compiled(torch.ones(64, 96)))
    return [t.detach().clone() for t in (*losses, *model.parameters())]


def compile_whole(model):
    return torch.compile(model, dynamic=True)


def compile_layers(model):
    for layer in model.layers:
        layer.compile(dynamic=True)
    return model


@needs_compiler
@pytest.mark.parametrize("strict", [False, True], ids=["mapped", "strict"])
@pytest.mark.parametrize("compiled_of", [compile_whole, compile_layers])
def test_compiled_training_gives_the_same_bits_in_half_its_memory(compiled_of, strict):
    batches = (256, 256, 192, 320)
    torch.compiler.reset()
    plain = train_compiled(compiled_of, batches)
    device = DEVICE | {"strict": strict, "seed": 9}
    with torchpager.simulate("64 MiB", **device), torchpager.auto_offload():
        torchpager.reset_stats()
        train_compiled(compiled_of, batches)
        peak = torchpager.stats().allocated.peak
    with (
        torchpager.simulate("64 MiB", **device),
        torchpager.budget(peak // 2),
        torchpager.auto_offload(),
    ):
        torchpager.reset_stats()
        paged = train_compiled(compiled_of, batches)
        stats = torchpager.stats()
        assert stats.reserved.peak <= peak // 2
        assert stats.evictions.count > 0
        assert figures("region_count") > 0
        assert figures("regions_open") == 0
        for expected, got in zip(plain, paged, strict=True):
            assert torch.equal(expected, got)
        del paged, expected, got
    torch.compiler.reset()


# -- the entry points ----------------------------------------------------------------------

IMPORTED_LATER = """
import sys
import torch
import torchpager
from torchpager import regions

assert "torch._inductor.output_code" not in sys.modules
with torchpager.simulate("64 MiB"), torchpager.auto_offload():
    with torchpager.auto_offload():
        pass
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch.export.pt2_archive._package import AOTICompiledModel
    assert len(regions._installed) >= 4, regions._installed
    assert hasattr(CompiledFxGraph.__call__, "__wrapped__")
    assert hasattr(CachingAutotuner.run, "__wrapped__")
    import torch._inductor.output_code as module
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__.loader is module.__loader__
assert not hasattr(CompiledFxGraph.__call__, "__wrapped__")
assert not hasattr(CachingAutotuner.run, "__wrapped__")
assert not regions._installed and regions._FINDER not in sys.meta_path
with torchpager.simulate("64 MiB"), torchpager.auto_offload():
    assert hasattr(CachingAutotuner.run, "__wrapped__")
print("fine")
"""


def test_modules_imported_later_are_wrapped_and_restored(run_python):
    assert run_python("-c", IMPORTED_LATER).stdout.strip().endswith("fine")


def test_jiterator_kernels_find_their_arguments_in_place(monkeypatch):
    seen = []

    def launch(_code, _name, _by_ref, _outputs, tensors, _options):
        seen.extend(testing.state(each).where for each in tensors)
        return tensors[0]

    # Compiling and launching one takes a GPU (tests/gpu does it).
    monkeypatch.setattr(
        torch._C, "_cuda_jiterator_compile_and_launch_kernel", launch, raising=False
    )
    jitted = torch.cuda.jiterator._create_jit_fn(
        "template <typename T> T f(T x, T y) { return x; }"
    )
    jitted.is_cuda_available = True
    with torchpager.simulate("64 MiB", large_min=1), torchpager.auto_offload():
        tensors = torch.ones(16384), torch.ones(16384)
        for each in tensors:
            testing.evict(each)
        assert jitted(*tensors) is tensors[0]
    assert seen == ["resident", "resident"]


def test_entry_points_exist_in_this_torch():
    for point in regions._ENTRY_POINTS:
        try:
            __import__(point.module)
        except ImportError:
            assert not point.module.startswith("torch.")
            continue
        owner = sys.modules[point.module]
        if point.owner is not None:
            owner = getattr(owner, point.owner)
        assert point.name in vars(owner)
