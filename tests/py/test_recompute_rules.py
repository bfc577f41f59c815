"""What may be dropped: for each rule a program that goes wrong without it, and failures.

``make mechanisms`` takes the rules away one at a time (``RecomputeRule`` in
csrc/bind/torch_recompute.h), and the test named there must fail then. Where a rule protects an
address, what asks for it here is a method that torchpager cannot wrap, as an extension would.
"""

import contextlib
import itertools
import threading

import pytest
import torch
from recompute_programs import bits, forced, operators, run, train
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from torchpager import recompute


def address(tensor):
    """What an extension sees. Raises if there are no bytes."""
    return torch._C.TensorBase.data_ptr(tensor)


def same_as_natively(program):
    """The number of drops of a program that has the same bits with and without them."""
    expected = run(program)
    state = torch.get_rng_state()
    with forced() as drops:
        assert run(program) == expected
        assert torch.equal(torch.get_rng_state(), state)
        return drops.count


def gradients_of(make, *shapes):
    """A program: what ``make`` computes from weights of these shapes, and their gradients."""

    def program():
        weights = [torch.rand(shape, requires_grad=True) for shape in shapes]
        loss = make(*weights).sum()
        operators()
        loss.backward()
        return loss, [w.grad for w in weights]

    return program


# ---- operators -------------------------------------------------------------------------------


def test_random_operators_do_not_run_again():
    drops = same_as_natively(
        gradients_of(lambda w: w * torch.rand_like(w) * torch.bernoulli(w), (64, 64))
    )
    assert drops <= 1  # the product, saved for the second one


def test_operators_with_statistics_do_not_run_again():
    model = train(
        lambda: nn.Sequential(nn.BatchNorm1d(64), nn.Sigmoid()),
        lambda: (torch.randn(64, 64), torch.randn(64, 64)),
        lambda m, x, y: (torch.tanh(m(x)) * y).sum(),
    )
    assert same_as_natively(model) > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda w: torch.cumsum(w, 0),
        lambda w: w.index_add(0, torch.arange(64), w.detach()),
        lambda w: w.scatter_add(0, torch.arange(64).expand(64, 64), w.detach()),
        lambda w: w.index_put((torch.arange(64),), w.detach(), accumulate=True),
    ],
    ids=["cumsum", "index_add", "scatter_add", "index_put"],
)
def test_operators_that_differ_each_time_do_not_run_again(make):
    weight = torch.rand(64, 64, requires_grad=True)
    with forced() as drops:
        result = make(weight.detach())
        loss = (result * weight).sum()  # which keeps it
        del result
        operators()
        assert drops.count == 0
        loss.backward()


FIRST_RERUN = 4  # the call of a kernel: after its own and the two of a trial


@contextlib.contextmanager
def kernel(function):
    """``torch.rsqrt`` on the CPU is ``function(x, number of the call)`` for a while."""
    calls = []
    library = torch.library.Library("aten", "IMPL")

    def counted(x):
        calls.append(None)
        return function(x, len(calls))

    try:
        library.impl("rsqrt", counted, "CPU")
        yield calls
    finally:
        library._destroy()


widths = itertools.count(64)


def behind_rsqrt():
    """A weight, a loss that needs what rsqrt has made for the weight's gradient, rsqrt's input.

    Each time of a new shape, since a trial is made once for each.
    """
    width = next(widths)
    weight, x = torch.rand(64, width, requires_grad=True), torch.full((64, width), 4.0)
    loss = (torch.rsqrt(x) * weight).sum()
    operators()
    return weight, loss, x


@pytest.mark.filterwarnings("ignore:.*rsqrt|.*kernel:UserWarning")
def test_operators_that_fail_their_trial_do_not_run_again():
    before = recompute.counts()
    with kernel(lambda x, number: torch.exp(x) * number), forced() as drops:
        weight, loss, _x = behind_rsqrt()
        loss.backward()
        assert torch.equal(weight.grad, torch.full_like(weight, 4.0).exp())
        assert drops.count == 0
    assert recompute.counts().failed_trials == before.failed_trials + 1


@pytest.mark.parametrize("workspace_count", [0, 8])
def test_operators_that_leave_memory_as_they_find_it_fail_their_trial(workspace_count):
    """Not by chance only: memory that nobody has used is the same everywhere."""

    def upper_half(x, _number):
        workspaces = [torch.empty_like(x) for _ in range(workspace_count)]
        made = torch.empty_like(x)
        made[:32] = 2.0
        del workspaces
        return made

    def program():
        x, weight = torch.ones(64, next(widths)), torch.ones(32, 1, requires_grad=True)
        loss = (torch.rsqrt(x)[:32] * weight).sum()
        operators()
        loss.backward()
        return weight.grad

    before = recompute.counts()
    with kernel(upper_half), forced() as drops:
        for _ in range(5):
            program()
        assert drops.count == 0
    assert recompute.counts().failed_trials == before.failed_trials + 5


@pytest.mark.parametrize("call", [2, 3])
@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError, KeyboardInterrupt])
def test_an_exception_in_a_trial_is_a_failed_trial(error, call):
    def function(x, number):
        if number == call:
            raise error("the trial")
        return torch.exp(x)

    before = recompute.counts()
    with kernel(function) as calls, forced() as drops:
        weight, loss, _x = behind_rsqrt()
        assert len(calls) == call
        loss.backward()
        assert torch.equal(weight.grad, torch.full_like(weight, 4.0).exp())
        assert drops.count == 0
    after = recompute.counts()
    assert after.failed_trials == before.failed_trials + 1
    assert after.failed_reruns == before.failed_reruns


# ---- inputs ----------------------------------------------------------------------------------


def test_inputs_that_are_written_do_not_change_what_was_made_of_them():
    def program():
        x, weight = torch.rand(64, 64), torch.rand(64, 64, requires_grad=True)
        loss = (torch.exp(x) * weight).sum()
        operators()
        x.zero_()
        operators()
        loss.backward()
        return weight.grad

    assert same_as_natively(program) > 0


def test_inputs_that_others_write_are_none():
    def program():
        x, weight = torch.rand(64, 64), torch.rand(64, 64, requires_grad=True)
        seen = x.numpy()
        loss = (torch.exp(x) * weight).sum()
        operators()
        seen[:] = 0
        operators()
        loss.backward()
        return weight.grad

    assert same_as_natively(program) == 0


# ---- who can reach it ------------------------------------------------------------------------


def test_what_python_has_keeps_its_bytes():
    with forced() as drops:
        x = torch.rand(64, 64, requires_grad=True)
        y = torch.exp(x)
        loss = y.sum()
        operators()
        assert address(y)
        del y
        operators()
        assert drops.count == 1
        loss.backward()


def test_what_somebody_unknown_has_keeps_its_bytes():
    with forced() as drops:
        x = torch.rand(64, 64, requires_grad=True)
        y = torch.exp(x)
        loss, other = y.sum(), y.data
        del y
        operators()
        assert address(other)
        del other
        operators()
        assert drops.count == 1
        loss.backward()
        y = torch.exp(x)
        loss, storage = y.sum(), y.untyped_storage()
        del y
        operators()
        assert torch._C.StorageBase.data_ptr(storage)
        assert drops.count == 1


class Holder(nn.Module):
    """Scripted, it keeps a tensor where Python does not see it."""

    def __init__(self):
        super().__init__()
        self.kept = torch.zeros(1)


@pytest.mark.filterwarnings("ignore:.*torch.jit:Warning")
def test_what_code_has_that_is_not_autograds_keeps_its_bytes():
    holder = torch.jit.script(Holder())
    with forced() as drops:
        x, weight = torch.rand(64, 64), torch.rand(64, 64, requires_grad=True)
        y = torch.exp(x)
        holder.kept = y
        products = [y * weight, (y.t() * weight).relu(), (weight - y) * y[:32].t().mean()]
        loss = sum(each.sum() for each in products)
        del y, products
        operators()
        assert address(holder.kept)
        others = drops.count
        holder.kept = torch.zeros(1)
        operators()
        assert drops.count == others + 1
        loss.backward()


def rand():
    return torch.exp(torch.rand(64, 64))


def an_index(weight, keep):
    index = torch.argmax(torch.rand(2048, 64), 1)
    keep(index)
    return weight[index]  # in a list of the caller's


def a_parameter_cast(weight, keep):
    cast = weight.to(torch.bfloat16)
    keep(cast)
    return cast * cast


def a_parameter_that_autocast_casts(weight, keep):
    with torch.autocast("cpu", torch.bfloat16):
        product = torch.mm(weight, weight)
        keep(product.grad_fn._saved_mat2)
    return product


def a_factor_of_a_view(weight, keep):
    base, factor = weight * 1, rand()
    view = base[:]
    view.mul_(factor)
    keep(factor)
    base.sum().backward()
    return view


def one_that_a_hook_is_given(weight, keep):
    factor = rand()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda nothing: nothing):
        return weight * factor


def one_that_a_mode_is_given(weight, keep):
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mul.Tensor:
                keep(args[1])
            return func(*args, **(kwargs or {}))

    factor = rand()
    with Mode():
        return weight * factor


def one_whose_view_has_moved(weight, keep):
    factor = rand()
    view = factor.view(-1)
    products = view * weight.view(-1), factor * weight
    view.data = torch.zeros(4096)
    keep(factor.data)
    return products


def one_that_two_threads_use(weight, keep):
    """While the second one's operator has references to it, the first one's ends."""
    shared, inside, done = torch.exp(weight), threading.Event(), threading.Event()
    second = threading.Thread(target=lambda: torch.log(shared))

    def log(x):
        if threading.current_thread() is second:
            inside.set()
            assert done.wait(20)
        else:
            second.start()
            assert inside.wait(20)
        return torch.zeros_like(x)

    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("log", log, "CPU")
        result = torch.log(shared)
    finally:
        done.set()
        second.join()
        library._destroy()
    keep(shared)
    return result


@pytest.mark.filterwarnings("ignore:.*torch.jit:Warning", "ignore:.*Overriding")
@pytest.mark.parametrize(
    "program",
    [
        an_index,
        a_parameter_cast,
        a_parameter_that_autocast_casts,
        a_factor_of_a_view,
        one_that_a_hook_is_given,
        one_that_a_mode_is_given,
        one_whose_view_has_moved,
        one_that_two_threads_use,
    ],
)
def test_no_reference_of_others_counts_as_autograds(program):
    holder = torch.jit.script(Holder())
    with forced(park=True):
        weight = torch.rand(64, 64, requires_grad=True)
        result = program(weight, lambda tensor: setattr(holder, "kept", tensor))
        operators()
        assert address(holder.kept)
        del result


@pytest.mark.parametrize("product", [torch.mm, functional.linear])
def test_what_autocast_casts_is_parked_while_its_cache_has_it(product):
    with forced(park=True) as drops, torch.autocast("cpu", torch.bfloat16):
        weight = torch.rand(64, 64, requires_grad=True)
        loss = product(torch.zeros(1, 64), weight)
        before = drops.count
        operators()
        assert drops.count == before + 1
        del loss


class Keeps(torch.autograd.Function):
    """Asks for the address of what it has saved, as one that calls an extension does."""

    @staticmethod
    def forward(ctx, x):
        inside = torch.exp(x)
        ctx.save_for_backward(x, inside)
        return inside.sum()

    @staticmethod
    def backward(ctx, grad):
        x, inside = ctx.saved_tensors
        assert address(x)
        assert address(inside)
        return grad * inside


def test_what_custom_functions_use_and_make_keeps_its_bytes():
    with forced() as drops:
        x = torch.rand(64, 64, requires_grad=True)
        loss = Keeps.apply(torch.tanh(x))
        operators()
        assert drops.count == 0
        loss.backward()


def test_what_foreign_operators_use_keeps_its_bytes():
    library = torch.library.Library("torchpager_test", "DEF")
    try:
        library.define("looks(Tensor x) -> Tensor")
        library.impl("looks", lambda x: x.sum(), "CompositeExplicitAutograd")
        with forced() as drops:
            x = torch.rand(64, 64, requires_grad=True)
            y = torch.exp(x)
            torch.ops.torchpager_test.looks(y.detach())
            loss = y.sum()
            del y
            operators()
            assert drops.count == 0
            loss.backward()
    finally:
        library._destroy()


def test_what_saved_tensor_hooks_were_given_keeps_its_bytes():
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return len(kept) - 1

    with forced() as drops:
        x = torch.rand(64, 64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda at: kept[at]):
            loss = torch.exp(x).sum()
        operators()
        assert all(address(tensor) for tensor in kept)
        assert drops.count == 0
        loss.backward()


def test_what_a_backward_pass_makes_keeps_its_bytes():
    with forced():
        x = torch.rand(64, 64, requires_grad=True)
        w, gradient = torch.rand(64, 64), torch.rand(64, 64)
        (x * w).backward(gradient)
        operators()
        assert address(x.grad)


def test_what_autograd_has_let_go_of_is_not_taken_for_its_own():
    with forced() as drops:
        x = torch.rand(64, 64, requires_grad=True)
        loss = torch.exp(x).sum()
        saved = loss.grad_fn.next_functions[0][0]._saved_result
        operators()
        loss.backward()
        operators()
        assert address(saved)
        assert drops.count == 0


# ---- the same as the first time --------------------------------------------------------------


def test_operators_run_again_below_autocast():
    def program():
        x, weight = torch.rand(64, 64, requires_grad=True), torch.rand(64, 64)
        with torch.autocast("cpu", torch.bfloat16):
            product = torch.mm(x, weight)
            loss = (product * product).sum()
            del product
        operators()
        loss.backward()
        return loss, x.grad

    assert same_as_natively(program) >= 1


def test_operators_run_again_under_the_settings_of_the_first_time():
    def program():
        weight = torch.rand(64, 64, requires_grad=True)
        numbers = torch.arange(4096).view(64, 64)
        loss = (torch.sigmoid(numbers) * weight).sum()
        operators()
        torch.set_default_dtype(torch.float64)
        try:
            loss.backward()
            assert torch.get_default_dtype() == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        return weight.grad

    assert same_as_natively(program) > 0


def test_settings_that_differ_keep_bytes_where_they_are():
    with forced() as drops:
        weight, numbers = torch.rand(64, 64, requires_grad=True), torch.arange(4096)
        made = torch.sigmoid(numbers.view(64, 64))
        loss = (made * weight).sum()
        torch.set_default_dtype(torch.float64)
        try:
            del made
            operators()
            assert drops.count == 0
        finally:
            torch.set_default_dtype(torch.float32)
        loss.backward()


# ---- failures --------------------------------------------------------------------------------

ROWS = 2048


@contextlib.contextmanager
def full():
    """Inside, there is no memory for what logsumexp needs beside its result.

    Yields the input of one, a loss that needs its result, and what takes the memory.
    """
    with forced("2 MiB", host="2 MiB") as drops:
        x = torch.rand(ROWS, 64, requires_grad=True)  # 512 KiB
        loss = torch.logsumexp(x, 1).sum()
        operators()
        assert drops.count == 1
        ballast = []
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                ballast.append(torch.zeros(16 << 10))
        yield x, loss, ballast


def expected_gradient(x):
    y = x.detach().clone().requires_grad_()
    torch.logsumexp(y, 1).sum().backward()
    return y.grad


def test_a_rerun_without_memory_raises_where_it_is_needed_and_may_be_tried_again():
    with full() as (x, loss, ballast):
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError, match="can be made again"):
                loss.backward(retain_graph=True)
        node = loss.grad_fn.next_functions[0][0]
        with pytest.raises(RuntimeError, match="could not allocate"):
            node._saved_result.tolist()
        # The thread and other operators are none the worse for it.
        del ballast[:12]
        assert torch.zeros(2048).add(1).sum() == 2048
        ballast.clear()
        loss.backward()
        assert bits(x.grad) == bits(expected_gradient(x))


def test_leaving_contexts_without_memory_is_no_crash():
    with full() as (x, loss, ballast):
        pass
    ballast.clear()
    with forced():
        loss.backward()
        assert bits(x.grad) == bits(expected_gradient(x))


def test_a_trial_without_memory_is_made_again_some_time():
    before = recompute.counts()
    with forced(budget="12 MiB", host="3 MiB") as drops:
        ballast = torch.ones(2 << 20)  # 8 MiB
        x = torch.ones(5 << 17, requires_grad=True)  # 2.5 MiB
        loss = torch.exp(x).sum()  # as much again
        operators(1)
        assert drops.count == 0
        assert recompute.counts().failed_trials > before.failed_trials
        del ballast
        operators(1)
        assert drops.count == 1
        loss.backward()
        assert torch.equal(x.grad, x.detach().exp())


def test_a_trial_looks_at_every_byte():
    def function(x, number):
        made = torch.exp(x)
        made[-1] = number
        return made

    x = torch.ones(9 << 20)  # 36 MiB
    with kernel(function), forced(budget="200 MiB", device="256 MiB") as drops:
        weight = torch.ones(9 << 20, requires_grad=True)
        loss = (torch.rsqrt(x + 0) * weight).sum()
        operators()
        assert drops.count == 0
        loss.backward()
        assert weight.grad[-1] == 1


def fails_at(number):
    def function(x, call):
        if call == number:
            raise ValueError("the rerun")
        return torch.exp(x)

    return function


def test_a_rerun_that_raises_does_so_where_it_is_needed_and_may_be_tried_again():
    failed = recompute.counts().failed_reruns
    with kernel(fails_at(FIRST_RERUN)) as calls, forced() as drops:
        weight, loss, _x = behind_rsqrt()
        assert drops.count == 1
        with pytest.raises(RuntimeError, match="ValueError: the rerun"):
            loss.backward(retain_graph=True)
        loss.backward()
        assert len(calls) == FIRST_RERUN + 1
        assert torch.equal(weight.grad, torch.full_like(weight, 4.0).exp())
    assert recompute.counts().failed_reruns == failed + 1


def test_what_could_not_be_made_again_before_a_write_is_never_wrong():
    with kernel(fails_at(FIRST_RERUN)), forced() as drops:
        _, loss, x = behind_rsqrt()
        assert drops.count == 1
        x.zero_()
        with pytest.raises(RuntimeError, match="an input has been written since"):
            loss.backward(retain_graph=True)


def test_what_an_operator_saves_before_it_writes_is_not_made_again():
    """``clamp_`` keeps a clone of what it finds, for its backward pass."""

    def make(w):
        kept = (w * 2).clone().sin()  # so that clones are trusted
        operators()
        y = w * 3
        y.clamp_(-1, 1)
        operators()
        return kept + y

    assert same_as_natively(gradients_of(make, (64, 64))) > 0


def test_a_rerun_that_makes_another_size_is_an_error():
    def function(x, call):
        return torch.exp(x) if call < FIRST_RERUN else torch.exp(x)[:32].clone()

    with kernel(function), forced() as drops:
        _, loss, _x = behind_rsqrt()
        assert drops.count == 1
        with pytest.raises(RuntimeError, match="another size"):
            loss.backward()


def test_dropout_with_attention_is_never_dropped():
    def program():
        q, k, v = (torch.rand(1, 4, 32, 16, requires_grad=True) for _ in range(3))
        loss = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5).sum()
        operators()
        loss.backward()
        return q.grad, k.grad, v.grad

    same_as_natively(program)
