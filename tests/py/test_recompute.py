"""Bytes that are made again: the same bits, and nobody notices."""

import contextlib
import copy
import ctypes
import io
import pickle
import resource
import threading

import numpy as np
import pytest
import torch
from recompute_programs import (
    GPT,
    SMALL,
    Cell,
    ConvNet,
    Custom,
    Recurrent,
    all_bits,
    bias_free,
    bits,
    cross_entropy,
    forced,
    images,
    mlp,
    operators,
    run,
    sequences,
    squares,
    tokens,
    train,
    vectors,
)
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import torchpager
from torchpager import _torch_cpu, patches, recompute, testing


def twice(loss, model):
    """Double backward."""
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum((g * g).sum() for g in gradients)


def retained(loss, model):
    del model
    loss.backward(retain_graph=True)
    return loss


def anomalous(loss, model):
    with torch.autograd.detect_anomaly(check_nan=True):
        return retained(loss, model)


def packed(model, x, y):
    """Saved-tensor hooks that keep what they are given."""
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda at: kept[at]):
        return squares(model, x, y)


def packed_in_part(model, x, y):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        x = model[0](x)
    return functional.mse_loss(model[1:](x), y)


def saved_on_cpu(model, x, y):
    with torch.autograd.graph.save_on_cpu():
        return squares(model, x, y)


def in_a_list(model, x, y):
    kept = []
    for layer in model:
        x = layer(x)
        kept.append(x)
    kept[1].data_ptr()
    return functional.mse_loss(x, y) + sum(each.mean() for each in kept)


def classes(model, x, y):
    return functional.cross_entropy(model(x), y)


DROPS, NEVER = True, False
PROGRAMS = {
    "gpt": (train(GPT, tokens, cross_entropy), DROPS),
    "autocast": (train(GPT, tokens, cross_entropy, amp=True), DROPS),
    "dropout": (train(lambda: GPT(dropout=0.1), tokens, cross_entropy), DROPS),
    "checkpoint": (train(lambda: GPT(reentrant=False), tokens, cross_entropy), None),
    "reentrant": (train(lambda: GPT(reentrant=True), tokens, cross_entropy), None),
    "convolutions": (train(ConvNet, images, classes), DROPS),
    "lstm": (train(Recurrent, vectors), DROPS),
    "gru over time": (train(Cell, vectors), None),  # its cell writes what it reads: parked only
    "custom function": (train(Custom, vectors), DROPS),
    "bias-free": (train(bias_free, sequences), DROPS),
    "double backward": (train(mlp, vectors, around=twice), DROPS),
    "retain_graph": (train(mlp, vectors, around=retained), DROPS),
    "anomaly mode": (train(mlp, vectors, around=anomalous), DROPS),
    "saved-tensor hooks": (train(mlp, vectors, packed), NEVER),
    "saved-tensor hooks in part": (train(mlp, vectors, packed_in_part), DROPS),
    "save_on_cpu": (train(mlp, vectors, saved_on_cpu), NEVER),
    "in a list": (train(mlp, vectors, in_a_list), None),
    "sgd": (train(mlp, vectors, optimizer=torch.optim.SGD, momentum=0.9), DROPS),
    "fused": (train(mlp, vectors, fused=True), DROPS),
    "foreach": (train(mlp, vectors, foreach=True), DROPS),
    "accumulation": (train(mlp, vectors, accumulate=3), DROPS),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", PROGRAMS)
def test_training_has_the_same_bits(name):
    program, dropped = PROGRAMS[name]
    expected = run(program)
    state, failed = torch.get_rng_state(), recompute.counts().failed_reruns
    with forced() as drops:
        assert run(program) == expected
        count, reruns = drops.count, drops.reruns
    assert torch.equal(torch.get_rng_state(), state)
    if dropped is not None:
        assert (count > 0) == dropped
        assert (reruns > 0) == dropped
    assert recompute.counts().failed_reruns == failed or not dropped


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_training_whose_saved_tensors_have_no_address_has_the_same_bits(name, strict):
    program, dropped = PROGRAMS[name]
    expected = run(program)
    with forced(budget="1500 KiB", park=True, strict=strict) as parks:
        assert run(program) == expected
        count = parks.count
        assert parks.reruns == 0
    assert torchpager.stats().parked.current == 0
    if dropped is not None:
        assert (count > 0) == dropped


@pytest.fixture
def turns():
    """What modules make is dropped and parked in turns."""
    count = 0

    def turn(*_):
        nonlocal count
        count += 1
        recompute.force(True, park=count % 3 == 0)

    handle = nn.modules.module.register_module_forward_hook(turn)
    yield
    handle.remove()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.usefixtures("turns")
@pytest.mark.parametrize("name", PROGRAMS)
def test_reruns_over_what_is_parked_have_the_same_bits(name):
    program, dropped = PROGRAMS[name]
    expected = run(program)
    with forced(budget="1500 KiB") as drops:
        assert run(program) == expected
        parks = torchpager.stats().parks.count
        if dropped:
            assert drops.count > 0
            assert parks > 0


def trained(seed, results):
    """What a small network comes to. It ends in ``results``, or what it raises does."""
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(96, 96, generator=generator) * 0.1 for _ in range(6)]
    weights = [weight.requires_grad_() for weight in weights]
    x = torch.randn(256, 96, generator=generator)
    try:
        for _ in range(12):
            h = x
            for weight in weights:
                h = torch.nn.functional.gelu(h @ weight) + h.sigmoid()
            h.square().mean().backward()
            with torch.no_grad():
                for weight in weights:
                    weight -= 0.1 * weight.grad
                    weight.grad = None
        results[seed] = [weight.detach().numpy().tobytes() for weight in weights]
    except RuntimeError as error:
        results[seed] = error


def test_what_one_thread_uses_is_not_parked_by_another():
    """An operator that has begun reads its operands' pointers whenever it likes."""
    expected, results = {}, {}
    for seed in (1, 2):
        trained(seed, expected)
    for _ in range(6):
        with forced(budget="1500 KiB", park=True) as parks:
            threads = [threading.Thread(target=trained, args=(i, results)) for i in (1, 2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert parks.count > 0
        assert results == expected


# ---- what sees no rerun ----------------------------------------------------------------------


def forward():
    """A loss, behind tensors that only autograd has."""
    x = torch.randn(64, 64, requires_grad=True)
    w = torch.randn(64, 64, requires_grad=True)
    loss = (torch.tanh(x @ w) @ w).relu().sum()
    operators()
    return x, w, loss


def test_inference_has_the_same_bits_and_grad_mode_is_as_it_was():
    def program():
        model = nn.ModuleList([mlp() for _ in range(3)])
        seen = []
        with torch.no_grad():
            x = torch.randn(64, 32)
            for each in model:
                x = each(x)
                seen.append(torch.is_grad_enabled())
        with torch.inference_mode():
            y = model[0](x)
            seen += [torch.is_inference_mode_enabled(), y.is_inference()]
        return x, y, seen, torch.is_grad_enabled()

    expected = run(program)
    with forced():
        assert run(program) == expected


def test_grad_mode_is_as_it_was_after_a_rerun():
    with forced() as drops:
        _, _, loss = forward()
        for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
            with mode():
                before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
                saved = loss.grad_fn.next_functions[0][0]._saved_result
                saved.tolist()
                assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
        loss.backward()
        assert drops.reruns > 0


def test_functional_transforms_have_the_same_bits():
    def program():
        w, x = torch.randn(64, 64), torch.randn(16, 64, 64)

        def loss(w, x):
            return (torch.tanh(x @ w).exp() @ w).square().mean()

        value, vjp = torch.func.vjp(loss, w, x[0])
        return (
            torch.func.grad(loss)(w, x[0]),
            torch.func.vmap(torch.func.grad(loss), (None, 0))(w, x),
            torch.func.jvp(lambda w: loss(w, x[0]), (w,), (w,)),
            torch.func.vmap(torch.sin)(x),
            vjp(value),
        )

    expected = run(program)
    with forced():
        assert run(program) == expected


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dispatch_mode_sees_no_rerun():
    def program():
        x, w, loss = forward()
        with Seen() as seen:
            loss.backward()
        y, v, loss = forward()
        loss.backward()
        return seen.names, x.grad, w.grad, y.grad, v.grad

    expected = run(program)
    with forced() as drops:
        assert run(program) == expected
        assert drops.reruns > 0


def test_program_under_a_dispatch_mode_has_the_same_bits():
    def program():
        with Seen() as seen:
            x, w, loss = forward()
            loss.backward()
        return seen.names, x.grad, w.grad

    expected = run(program)
    with forced():
        assert run(program) == expected


def test_profiler_sees_no_rerun():
    def program():
        x, w, loss = forward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            loss.backward()
        names = sorted(e.name for e in seen.events() if e.name.startswith("aten::"))
        return names, x.grad, w.grad

    expected = run(program)
    with forced() as drops:
        assert run(program) == expected
        assert drops.reruns > 0


def test_version_counters_are_as_they_were():
    with forced():
        x, w, loss = forward()
        node = loss.grad_fn.next_functions[0][0]
        versions = x._version, w._version, node._saved_result._version
        operators()
        loss.backward(retain_graph=True)
        assert (x._version, w._version, node._saved_result._version) == versions


def test_a_write_to_what_was_saved_is_still_an_error():
    with forced() as drops:
        x = torch.randn(64, 64, requires_grad=True)
        y = torch.exp(x)
        loss = (y * 2).sum()
        del y
        operators()
        loss.grad_fn.next_functions[0][0].next_functions[0][0]._saved_result.detach().add_(1)
        operators()
        assert drops.count > 0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_threads_that_train_at_once_have_the_same_bits():
    count, steps = 3, 6

    def program():
        torch.manual_seed(7)
        models = [mlp() for _ in range(count)]
        data = [[vectors() for _ in range(steps)] for _ in range(count)]
        failures = []

        def work(model, batches):
            try:
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                for x, y in batches:
                    squares(model, x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=work, args=each) for each in zip(models, data, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        return [list(model.parameters()) for model in models]

    expected = run(program)
    with forced() as drops:
        assert run(program) == expected
        assert drops.reruns > 0


# ---- inputs that change ----------------------------------------------------------------------


def behind(leaf, function=torch.exp):
    """A loss that needs, for the gradient of the weight returned, what was made of ``leaf``."""
    w = torch.randn(leaf.shape[-1], 64, requires_grad=True)
    loss = (function(leaf) @ w).sum()
    operators()
    return w, loss


def same_gradient(make, change, function=torch.exp, *, dropped=True):
    """The weight's gradient is that of a run in which ``change`` never comes."""
    torch.manual_seed(3)
    w, loss = behind(make(), function)
    loss.backward()
    with forced() as drops:
        torch.manual_seed(3)
        leaf = make()
        v, loss = behind(leaf, function)
        assert (drops.count > 0) == dropped
        change(leaf)
        operators()
        loss.backward()
        assert bits(v.grad) == bits(w.grad)


def large():
    return torch.randn(64, 64)


def native():
    return torch.randn(8, 8)


@pytest.mark.parametrize(
    ("make", "function"),
    [(large, torch.exp), (native, lambda x: torch.ones(512, 1) + x.reshape(1, 64))],
    ids=["ours", "small"],
)
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.zero_(),
        lambda x: x.view(-1)[3:].add_(1),
        lambda x: torch.add(x, 1, out=x),
        lambda x: torch._foreach_mul_([x], 2.0),
        lambda x: x.detach().copy_(torch.zeros_like(x)),
        lambda x: x.untyped_storage().fill_(0),
    ],
)
def test_writes_to_an_input_do_not_change_what_was_made_of_it(make, function, write):
    torch.manual_seed(3)
    leaf = make()
    w = torch.randn(64, 64, requires_grad=True)
    (function(leaf) @ w).sum().backward()
    with forced() as drops:
        torch.manual_seed(3)
        leaf = make()
        v = torch.randn(64, 64, requires_grad=True)
        loss = (function(leaf) @ v).sum()
        operators()
        assert drops.count > 0
        write(leaf)
        operators()
        loss.backward()
        assert bits(v.grad) == bits(w.grad)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.untyped_storage().resize_(0),
        lambda x: x.resize_(0),
        lambda x: x.numpy().fill(0),
        lambda x: ctypes.memset(x.data_ptr(), 0, x.nbytes),
        lambda x: x.apply_(lambda _: 0.0) if x.numel() < 8192 else None,
        lambda x: torch.from_dlpack(x).zero_(),
        lambda x: x.untyped_storage().__setitem__(slice(0, 1000), 1),
        lambda x: x.untyped_storage().byteswap(torch.float32),
        lambda x: x.share_memory_().zero_(),
    ],
    ids=["storage", "tensor", "numpy", "pointer", "apply", "dlpack", "item", "swap", "shared"],
)
def test_writes_that_no_operator_announces_do_not_either(write):
    same_gradient(large, write)


def test_what_is_made_of_memory_that_others_write_is_not_dropped():
    seen_by_numpy = []

    def exported():
        leaf = large()
        seen_by_numpy.append(leaf.numpy())
        return leaf

    same_gradient(exported, lambda _: seen_by_numpy[-1].fill(0), dropped=False)

    def foreign():
        seen_by_numpy.append(np.random.default_rng(0).random((256, 256), dtype=np.float32))
        return torch.from_numpy(seen_by_numpy[-1])

    same_gradient(foreign, lambda _: seen_by_numpy[-1].fill(0), dropped=False)


# ---- doors of Python -------------------------------------------------------------------------


def saved(loss):
    return loss.grad_fn.next_functions[0][0]._saved_result


def loss_behind_exp():
    x = torch.linspace(-1, 1, 4096).reshape(64, 64).requires_grad_()
    loss = torch.exp(x).sum()
    operators()
    return loss


def loaded(x):
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer)


READS = {
    "numpy": lambda x: x.detach().numpy(),
    "asarray": lambda x: np.asarray(x.detach()),
    "tolist": lambda x: x.tolist(),
    "item": lambda x: [[x[i, j].item() for j in range(64)] for i in range(64)],
    "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "save": lambda x: loaded(x.detach()),
    "dlpack": lambda x: torch.from_dlpack(x.detach()),
    "numpy dlpack": lambda x: np.from_dlpack(x.detach()),
    "storage": lambda x: np.frombuffer(bytes(x.untyped_storage().tolist()), np.float32).reshape(
        64, 64
    ),
    "storage copy": lambda x: torch.empty(0).set_(x.untyped_storage().clone()).view(64, 64),
    "data_ptr": lambda x: np.ctypeslib.as_array(
        (ctypes.c_float * 4096).from_address(x.data_ptr())
    ).reshape(64, 64),
    "storage pointer": lambda x: np.ctypeslib.as_array(
        (ctypes.c_float * 4096).from_address(x.untyped_storage().data_ptr())
    ).reshape(64, 64),
    "is_pinned": lambda x: x.is_pinned() or x.detach().clone(),
    "view": lambda x: x.detach()[:, :].T.T.numpy(),
    "repr": lambda x: repr(x) and x.detach().clone(),
    "shared": lambda x: x.detach().share_memory_(),
}


@pytest.mark.parametrize("name", READS)
def test_python_reads_the_right_bytes_of_a_dropped_tensor(name):
    expected = torch.linspace(-1, 1, 4096).reshape(64, 64).exp()
    with forced() as drops:
        loss = loss_behind_exp()
        tensor = saved(loss)
        assert drops.count == 1
        assert _torch_cpu.is_dropped(tensor)
        assert testing.state(tensor).where == "dropped"
        read = torch.as_tensor(READS[name](tensor)).clone()
        assert torch.equal(read, expected)
        assert not _torch_cpu.is_dropped(tensor)


def test_pin_makes_again_what_was_dropped():
    with forced():
        loss = loss_behind_exp()
        with torchpager.pin(saved(loss)) as pin:
            assert pin.bytes >= 4096 * 4
            assert not _torch_cpu.is_dropped(saved(loss))


def test_pointers_on_other_devices_go_through_the_same_doors():
    """What CUDA devices have in place of patches.install()."""
    found = torch.Tensor.data_ptr
    patches.install_pointers()
    try:
        x = torch.ones(4)
        assert x.data_ptr() == x.untyped_storage().data_ptr() == torch.Tensor.data_ptr(x)
        assert torch.from_dlpack(x).tolist() == [1, 1, 1, 1]
        x.untyped_storage().resize_(32)
        assert x.untyped_storage().nbytes() == 32
        assert torch.Tensor.data_ptr is not found
    finally:
        patches.uninstall_pointers()
    assert torch.Tensor.data_ptr is found


def test_parking_alone_goes_through_them_too(monkeypatch):
    found, owner = torch.Tensor.data_ptr, object()
    monkeypatch.setattr(recompute, "_set", id)
    recompute.start(owner, 0, again=False)
    try:
        assert torch.Tensor.data_ptr is not found
    finally:
        recompute.stop(owner)
    assert torch.Tensor.data_ptr is found


def held_by_process():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def test_what_is_used_again_and_again_is_not_counted_for_ever():
    with forced(park=True):
        weight, constant = torch.rand(32, 32, requires_grad=True), torch.exp(torch.rand(32, 32))

        def use(times):
            for _ in range(times):
                weight * constant
                weight[:8] * constant[:8]

        use(1000)
        before = held_by_process()
        use(8000)
        assert held_by_process() - before < 6 << 20


def test_tensors_may_be_swapped():
    """PyTorch refuses that while anybody refers to one weakly."""
    with forced(park=True):
        x = torch.rand(64, 64)
        made, written = torch.exp(x), torch.exp(x)
        double = written * 2
        written.add_(1)
        expected = [bits(written), bits(made)]
        torch.utils.swap_tensors(made, written)
        assert [bits(made), bits(written)] == expected
        operators()
        torch.utils.swap_tensors(made, written)
        assert [bits(written), bits(made)] == expected
        del double


def test_a_storage_that_has_moved_says_where_it_is():
    with forced(park=True):
        x = torch.rand(64, 64, requires_grad=True)
        asked = [
            torch.Tensor.is_shared,
            lambda t: t.untyped_storage().is_pinned(),
            lambda t: torch.empty(0).set_(t).data_ptr() == 0,
            lambda t: torch.empty(0).set_(t.untyped_storage(), 0, (8,)).data_ptr() == 0,
        ]
        for ask in asked:
            loss = torch.exp(x).sum()
            operators()
            tensor = loss.grad_fn.next_functions[0][0]._saved_result
            assert _torch_cpu.is_dropped(tensor)
            assert not ask(tensor)
            del tensor


def test_what_python_holds_after_the_backward_pass_is_not_dropped():
    """Autograd has let go of what it saved: what is left is somebody else's."""
    with forced():
        loss = loss_behind_exp()
        tensor = saved(loss)
        loss.backward()
        operators()
        assert not _torch_cpu.is_dropped(tensor)
        assert torch._C.TensorBase.data_ptr(tensor)


def test_what_python_holds_after_the_graph_has_gone_is_not_dropped():
    with forced():
        loss = loss_behind_exp()
        tensor = saved(loss).detach()
        assert _torch_cpu.is_dropped(tensor)
        assert (tensor + 1).min() > 1
        del loss
        operators()
        assert not _torch_cpu.is_dropped(tensor)
        assert torch.equal(tensor, torch.linspace(-1, 1, 4096).reshape(64, 64).exp())


def test_graphs_that_go_without_a_backward_pass_leave_nothing_behind():
    with forced():
        operators()
        before = torchpager.stats().allocated.current
        for _ in range(20):
            loss_behind_exp()
        assert torchpager.stats().allocated.current <= before
        assert torchpager.stats().dropped.current == 0


# ---- contexts --------------------------------------------------------------------------------


def test_leaving_the_context_brings_everything_back():
    expected = torch.linspace(-1, 1, 4096).reshape(64, 64).exp()
    with forced():
        losses = [loss_behind_exp() for _ in range(5)]
        assert torchpager.stats().dropped.current >= 5 * 4096 * 4
    assert torchpager.stats().dropped.current == 0
    for loss in losses:
        assert torch.equal(saved(loss), expected)
        assert torch._C.TensorBase.data_ptr(saved(loss))
        loss.backward()


def test_kept_graphs_are_right_after_the_context():
    def program():
        return forward()

    torch.manual_seed(0)
    x, w, loss = program()
    loss.backward()
    with forced() as drops:
        torch.manual_seed(0)
        y, v, loss = program()
        assert drops.count > 0
    loss.backward()
    assert all_bits([y.grad, v.grad]) == all_bits([x.grad, w.grad])


# ---- plans -----------------------------------------------------------------------------------

STEPS = 10
SLOW = {"link": "4 MB"}  # so that moving never pays


class Steps:
    """A training, step by step, with what each has moved and dropped."""

    def __init__(self, lengths=(64,)):
        torch.manual_seed(1)
        self.lengths = lengths
        self.model = GPT(layers=3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, fused=True)
        self.losses, self.filled, self.dropped, self.held = [], [], [], []

    def forward(self):
        length = self.lengths[len(self.losses) % len(self.lengths)]
        x, y = torch.randint(0, 64, (8, length)), torch.randint(0, 64, (8, length))
        return cross_entropy(self.model, x, y)

    def backward(self, loss):
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def run(self, count=STEPS, stats=True):
        for _ in range(count):
            before = torchpager.stats() if stats else None
            self.backward(self.forward())
            if stats:
                after = torchpager.stats()
                self.filled.append(after.fills.bytes - before.fills.bytes)
                self.held.append(after.held.current)
                self.dropped.append(after.drops.bytes - before.drops.bytes)
        return self

    def bits(self):
        return all_bits([self.losses, list(self.model.parameters())])


@contextlib.contextmanager
def planned(budget, *, recompute=True, strict=False):
    with (
        torchpager.simulate("64 MiB", strict=strict, **SMALL, **SLOW),
        torchpager.auto_offload(recompute=recompute),
        torchpager.budget(budget),
    ):
        yield


def peak_of_steps(**options):
    with torchpager.simulate("64 MiB", **SMALL):
        torchpager.reset_stats()
        Steps(**options).run(2)
        return torchpager.stats().allocated.peak


def test_training_inside_half_its_peak_drops_instead_of_moving():
    expected = Steps().run(stats=False).bits()
    half = peak_of_steps() // 2
    with planned(half, recompute=False):
        moving = Steps().run()
        assert moving.bits() == expected
    with planned(half):
        dropping = Steps().run()
        assert dropping.bits() == expected
        assert torchpager.stats().dropped.current == 0
    assert max(dropping.held) <= half
    assert all(each == 0 for each in moving.dropped)
    assert all(each > 0 for each in dropping.dropped[-3:])
    assert sum(dropping.filled[-3:]) < sum(moving.filled[-3:]) / 2


@pytest.mark.parametrize("strict", [False, True])
def test_parking_alone_inside_half_its_peak(monkeypatch, strict):
    """Bits are moved, nothing runs again, and what is moved has no address meanwhile."""
    expected = Steps().run(stats=False).bits()
    half = peak_of_steps() // 2
    monkeypatch.setenv("TORCHPAGER_DEBUG", "park")
    with planned(half, recompute=False, strict=strict):
        before = recompute.counts()
        steps = Steps().run()
        assert steps.bits() == expected
        loss = steps.forward()
        assert torchpager.stats().parked.current > 0
        stats = torchpager.stats()
        assert stats.parks.count > 0
        assert stats.drops.count == stats.reruns.count == 0
        assert recompute.counts().trials == before.trials
    assert torchpager.stats().parked.current == 0
    assert max(steps.held) <= half
    steps.backward(loss)


def test_steps_of_two_kinds_in_turn_have_the_same_bits():
    lengths = (64, 48)
    expected = Steps(lengths).run(stats=False).bits()
    with planned(peak_of_steps() // 2):
        steps = Steps(lengths).run()
        assert steps.bits() == expected
    assert sum(steps.dropped) > 0


def test_a_step_that_outlives_its_context_has_the_same_bits():
    whole = Steps().run(8, stats=False).bits()
    half = peak_of_steps() // 2
    with planned(half):
        steps = Steps().run(7)
        loss = steps.forward()
        assert torchpager.stats().dropped.current > 0
    assert torchpager.stats().dropped.current == 0
    steps.backward(loss)
    assert steps.bits() == whole
