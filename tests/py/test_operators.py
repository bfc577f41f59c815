"""Every kind of operand and operator, on a device that evicts everything before each operator.

Strict mode: bytes in HOST are not mapped, so an operator whose operands the hook did not find
crashes here, and one whose writes it did not find loses them. Each program runs plainly first.
"""

import ctypes
import gc

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad, gradgradcheck
from torch.utils import _pytree as pytree

import torchpager
from torchpager import testing

SIDE = 48
GRANULE = 4096


@pytest.fixture(autouse=True)
def one_thread():
    """Sums depend on how they are split among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def paging(large_min=1):
    return torchpager.simulate(
        "64 MiB",
        granularity=GRANULE,
        large_min=large_min,
        strict=True,
        page_out_before_each_op=True,
    )


def bits(result):
    """The bytes of all tensors in a result, read by an operator."""
    found = []
    for leaf in pytree.tree_leaves(result):
        if not isinstance(leaf, torch.Tensor):
            found.append(leaf)
            continue
        plain = leaf.detach().resolve_conj().resolve_neg()
        flat = torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain.reshape(-1))
        found.append((tuple(plain.shape), flat.view(torch.uint8).numpy().tobytes()))
    return found


def same_bits(program, **options):
    """Run a program plainly and under paging; its results must be equal, and it must page."""
    torch.manual_seed(1)
    plain = bits(program())
    assert plain, "the program must return something"
    gc.collect()
    with paging(**options), torchpager.auto_offload():
        stats = torchpager.stats()
        before, unseen = stats.misses.count, stats.unseen_writes.count
        torch.manual_seed(1)
        result = program()
        found = bits(result)
        del result
        gc.collect()
        testing.page_out_all()
        assert torchpager.stats().misses.count > before
        assert torchpager.stats().unseen_writes.count == unseen
    assert found == plain


def raw_pointer(tensor):
    """A pointer that nobody was told of."""
    return torch._C.TensorBase.data_ptr(tensor)


def square(seed, *shape, **options):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (SIDE, SIDE)), generator=generator, **options)


# -- views and storages ------------------------------------------------------------------------


def views():
    x = square(1)
    parts = [x.t(), x[3:9], x[:, ::3], x.view(-1)[5:-5], x.diagonal(), x.unfold(0, 5, 3)]
    places = torch.tensor([3, 9])
    x = x * 1
    parts += torch.tensor_split(x, places)
    parts += list(x.split(7)) + list(x.unbind(1)[:3]) + [x.expand(3, SIDE, SIDE), x.real]
    return [part * 2 + part.sum() for part in parts]


def writes_through_views():
    x = square(1)
    x.t()[2:5].mul_(3)
    x[:, ::7] = x[:, 1::7][:, :7]
    x.view(-1)[100:200].copy_(x.view(-1)[300:400])
    x.diagonal().zero_()
    x[x > 1] = -1
    x.index_put_((torch.tensor([1, 2]), torch.tensor([3, 4])), torch.tensor([5.0, 6.0]))
    x.masked_fill_(x.gt(0.9), 9).scatter_(0, torch.zeros(1, SIDE, dtype=torch.long), 4.0)
    return x


def overlapping_storages():
    x = square(1, 4000)
    windows = x.as_strided((60, 100), (50, 1))
    other = torch.empty(0).set_(x.untyped_storage(), 1000, (30, 40), (40, 1))
    other.add_(1)
    result = [windows.sum(1), windows @ windows.t(), other + 1, x]
    x.as_strided((20, 20), (100, 1), 7).mul_(2)
    return [*result, x * 1]


def storages_that_change():
    x = square(1)
    y = x.new_empty(0)
    y.set_(x)
    x.data = square(2)
    z = torch.empty(0).resize_(50, 50).copy_(square(3, 50, 50))
    z.resize_(60, 60)[50:].zero_()
    z.view(-1)[2500:].zero_()
    w = square(4)
    torch.utils.swap_tensors(w, x)
    return [x, y, z, w]


def out_arguments():
    x, y = square(1), square(2)
    out, empty = torch.zeros(SIDE, SIDE), torch.empty(0)
    torch.mm(x, y, out=out)
    torch.index_select(x, 0, torch.arange(5), out=empty)
    values, places = torch.empty(0), torch.empty(0, dtype=torch.long)
    torch.sort(x, out=(values, places))
    into = torch.zeros(SIDE * 2, SIDE)
    torch.cat([x, y], out=into)
    torch.add(x, y, out=into[10 : 10 + SIDE])
    torch.stack([x, out], out=torch.empty(0))
    torch.linalg.inv(x + 50 * torch.eye(SIDE), out=out.t())
    return [out, empty, values, places, into]


def in_place_operators():
    x, y = square(1), square(2)
    x.add_(y).mul_(y).sin_().clamp_(-0.5, 0.5).addmm_(x, y).addcmul_(x, y, value=0.5)
    x.lerp_(y, 0.3).transpose_(0, 1).tril_().fill_diagonal_(3.0).cumsum_(0).relu_()
    x.index_add_(0, torch.tensor([0, 0, 3]), y[:3]).clamp_max_(y)
    return [x, nn.functional.relu(y, inplace=True), nn.functional.dropout(x, 0.5, inplace=True)]


def zero_size():
    x = square(1)
    empty = x[:0]
    return [torch.cat([empty, x]), empty.sum(), empty @ x, torch.empty(0, 3).mean(1), empty * 2]


# -- lists, optional and undefined -------------------------------------------------------------


def foreach_lists():
    xs, ys = [square(i) for i in range(5)], [square(i + 10) for i in range(5)]
    ys[2] = ys[2].t()
    torch._foreach_add_(xs, ys, alpha=0.5)
    torch._foreach_addcmul_(xs, ys, xs, 0.1)
    torch._foreach_lerp_(xs, ys, 0.25)
    torch._foreach_copy_(ys[:2], xs[2:4])
    norms = torch._foreach_norm(xs)
    torch._foreach_mul_(xs, norms[0])
    return [xs, ys, norms, torch._foreach_sqrt(torch._foreach_abs(xs))]


def fused_lists():
    torch.manual_seed(3)
    results = []
    for make in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad):
        parameters = [nn.Parameter(square(i)) for i in range(3)]
        optimizer = make(parameters, lr=0.01, fused=True)
        for step in range(3):
            for index, parameter in enumerate(parameters):
                # One has no gradient at first, and another a gradient of another geometry.
                ready = index or step
                parameter.grad = square(step * 10 + index).t() if ready else None
            optimizer.step()
        states = [optimizer.state[p] for p in parameters]
        results.append([parameters, [dict(sorted(state.items())) for state in states]])
    return results


def optional_and_undefined():
    x, weight = square(1, 4, 6, 10), square(2, 8, 6, 3)
    outputs = [torch.conv1d(x, weight), torch.conv1d(x, weight, square(3, 8))]
    outputs += [
        nn.functional.layer_norm(x, (10,)),
        nn.functional.batch_norm(x, None, None, training=True),
    ]
    outputs.append(torch.clamp(x, min=square(4, 10)))
    outputs += [torch.bucketize(x, square(5, 20).sort().values)]
    # Gradients that are not wanted or not defined.
    a, b, c = (square(i, requires_grad=True) for i in (6, 7, 8))
    left, right = (a * b).split(SIDE // 2)
    grads = torch.autograd.grad(left.sum(), (a, b, c), allow_unused=True)
    outputs += [grad for grad in grads if grad is not None]
    mask = nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=None)
    return [*outputs, right, mask, x[:, None, 2], x[None, [0, 1], :, torch.tensor([1, 2])]]


def no_storage():
    x = square(1)
    meta = torch.empty(SIDE, SIDE, device="meta")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        shapes = [tuple((fake @ fake.t()).shape), tuple((meta * 2).shape)]
    efficient = torch._efficientzerotensor((SIDE, SIDE))
    return [shapes, x + efficient, efficient * x, torch.empty_like(meta).shape[0], x * 2]


# -- layouts and dtypes ------------------------------------------------------------------------


def sparse_layouts():
    dense = square(1).relu()
    results = []
    for make in (
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: x.to_sparse_csc(),
        lambda x: x.to_sparse_bsr((4, 4)),
        lambda x: x.to_sparse_bsc((4, 4)),
    ):
        sparse = make(dense)
        results += [sparse.to_dense(), sparse.values() * 2, (sparse * 2).to_dense()]
        results.append(sparse.clone().to_dense())
    coo = dense.to_sparse()
    results += [
        coo @ dense,
        torch.sparse.sum(coo, 0).to_dense(),
        (coo + coo).coalesce().values(),
    ]
    results += [coo.t().to_dense(), torch.sparse.softmax(coo, 1).to_dense()]
    results += [dense.to_sparse_csr() @ dense, torch.sparse.mm(coo, coo).to_dense()]
    coo.mul_(3)
    results.append(dense.clone().add_(coo))
    table = nn.Embedding(100, 40, sparse=True)
    torch.nn.init.uniform_(table.weight)
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(torch.tensor([1, 5, 5, 9])).square().sum().backward()
    gradient = table.weight.grad.coalesce()
    results += [gradient.values().clone(), gradient.indices().clone()]
    optimizer.step()
    return [*results, table.weight]


def nested_tensors():
    pieces = [square(i, 10 + i, SIDE) for i in range(4)]
    weight = square(9)
    results = []
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(pieces, layout=layout)
        results.append((nested * 2).to_padded_tensor(0.0))
        results.append(nn.functional.linear(nested, weight).to_padded_tensor(1.0))
        results += list((nested + nested).unbind())
        results.append(torch.softmax(nested, -1).to_padded_tensor(0.0))
    leaves = [piece.clone().requires_grad_() for piece in pieces]
    joined = torch.nested.as_nested_tensor(leaves, layout=torch.jagged)
    nn.functional.linear(joined, weight).square().values().sum().backward()
    return results + [leaf.grad for leaf in leaves]


def test_nested_tensors():
    # Their sizes and offsets are read by pointer, also outside operators. So what is large in
    # a real program pages here, and these small tables do not.
    same_bits(nested_tensors, large_min=1024)


def quantised_tensors():
    x = square(1)
    scales, zeros = torch.linspace(0.01, 0.1, SIDE), torch.zeros(SIDE, dtype=torch.long)
    per_tensor = torch.quantize_per_tensor(x, 0.05, 3, torch.quint8)
    per_channel = torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8)
    results = [per_tensor.int_repr(), per_tensor.dequantize(), per_channel.dequantize()]
    results += [per_channel.q_per_channel_scales(), per_channel.q_per_channel_zero_points()]
    results += [per_tensor[3:9].dequantize(), per_channel.clone().int_repr()]
    fake = torch.fake_quantize_per_channel_affine(x, scales, zeros.int(), 0, -128, 127)
    observer = torch.ao.quantization.MovingAverageMinMaxObserver
    for make in (
        torch.ao.quantization.FakeQuantize,
        torch.ao.quantization.FusedMovingAvgObsFakeQuantize,
    ):
        observed = make(observer=observer)
        for turn in range(3):
            results.append(observed(x * (turn + 1)))
        results += [
            observed.scale,
            observed.zero_point,
            observed.activation_post_process.max_val,
        ]
    return [*results, fake]


def complex_tensors():
    x, y = square(1, dtype=torch.complex64), square(2, dtype=torch.complex64)
    results = [x.conj() @ y, x.conj().imag * 2, (x.conj().imag + 1), x.mH @ y, x.angle()]
    lazy = x.conj()
    lazy.mul_(2)
    negative = x.conj().imag
    negative.add_(1)
    results += [torch.view_as_real(x).sum(-1), torch.view_as_complex(square(3, SIDE, 2)) * 2]
    results += [torch.fft.fft2(x), torch.fft.irfft(x), torch.complex(x.real, y.imag), x, lazy]
    leaf = y.clone().requires_grad_()
    (leaf.conj() * leaf).real.sum().backward()
    return [*results, leaf.grad, torch.linalg.eigh(x @ x.mH).eigenvalues]


def narrow_dtypes():
    x = square(1)
    results = []
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8):
        y = (x * 10).to(dtype)
        results += [
            y + y,
            y.to(torch.float32),
            y.view(torch.uint8) if y.element_size() > 1 else y,
        ]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer = nn.Linear(SIDE, SIDE)
        nn.init.constant_(layer.weight, 0.25)
        nn.init.zeros_(layer.bias)
        loss = layer(x).square().sum()
    loss.backward()
    return [
        *results,
        loss,
        layer.weight.grad,
        (x > 0).logical_not(),
        x.to(torch.float8_e4m3fn).float(),
    ]


# -- subclasses, custom operators, custom functions --------------------------------------------


class Named(torch.Tensor):
    """A subclass with __torch_function__."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(result, cls):
            result.note = function.__name__
        return result


class Pair(torch.Tensor):
    """A wrapper of two tensors with __torch_dispatch__; it has no storage of its own."""

    @staticmethod
    def __new__(cls, low, high):
        return torch.Tensor._make_wrapper_subclass(cls, low.shape, dtype=low.dtype)

    def __init__(self, low, high):
        self.halves = (low, high)

    @classmethod
    def __torch_dispatch__(cls, function, _types, args=(), kwargs=None):
        def half(index):
            return pytree.tree_map_only(cls, lambda x: x.halves[index], (args, kwargs or {}))

        low, high = (function(*a, **k) for a, k in (half(0), half(1)))
        if function._schema.is_mutable:
            return args[0]
        return Pair(low, high)


class Shadow(torch.Tensor):
    """A subclass of __torch_dispatch__ over a storage of its own."""

    @classmethod
    def __torch_dispatch__(cls, function, _types, args=(), kwargs=None):
        with torch.utils._mode_utils.no_dispatch():
            return function(*args, **(kwargs or {}))


def tensor_subclasses():
    named = square(1).as_subclass(Named)
    results = [(named * 2 + named.t()).as_subclass(torch.Tensor)]
    pair = Pair(square(2), square(3))
    pair.mul_(2)
    total = (pair @ pair + 1).relu()
    results += [*total.halves, *pair.halves]
    shadow = torch.Tensor._make_subclass(Shadow, square(4))
    results += [shadow + 1, torch.mm(shadow, shadow)]
    leaf = nn.Parameter(square(5))
    (leaf.as_subclass(Named) ** 2).sum().backward()
    return [*results, leaf.grad, nn.UninitializedParameter.cls_to_become is nn.Parameter]


def modes():
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    x = square(1)
    with Functions(), Dispatches():
        x.add_(1)
        y = nn.functional.softmax(x @ x.t(), -1)
    return [x, y]


@pytest.fixture(scope="module")
def custom():
    """Custom operators: one that declares its mutation, one that does not, one functional."""
    library = torch.library.Library("tp_operators", "DEF")
    library.define("declared(Tensor(a!) x, Tensor y) -> ()")
    library.define("undeclared(Tensor x, Tensor[] ys) -> Tensor")
    library.define("functional(Tensor x, Tensor? y=None) -> Tensor")

    def declared(x, y):
        x.copy_(y * 3)

    def undeclared(x, ys):
        for y in ys:  # what a kernel in C does, which no other operator announces
            ctypes.memmove(raw_pointer(y), raw_pointer(x), x.nbytes)
        return x * 1

    library.impl("declared", declared, "CPU")
    library.impl("undeclared", undeclared, "CPU")
    library.impl("functional", lambda x, y=None: x * 2 if y is None else x + y, "CPU")
    yield torch.ops.tp_operators
    library._destroy()


def custom_operators(operators):
    x, y, z = square(1), square(2), square(3)
    for _ in range(3):
        operators.declared(x, y)
        z = z + operators.undeclared(z, [y])
    return [x, y, z, operators.functional(x), operators.functional(x, y)]


def test_custom_operators(custom):
    same_bits(lambda: custom_operators(custom))


def test_empty_tensor_stays_put_until_an_operator_has_used_it():
    """C++ code makes it by torch.empty and fills it by pointer, as gloo's threads do."""
    with paging(), torchpager.auto_offload():
        other = square(1) + 0
        made = [torch.empty(SIDE, SIDE), torch.empty_like(other), other.new_empty(SIDE, SIDE)]
        for turn, x in enumerate(made):
            other.add_(1)
            assert testing.state(other).where == "resident"
            ctypes.memset(raw_pointer(x), turn, x.nbytes)
            other.add_(1)
            assert testing.state(x).where == "resident"
            assert bytes(x.view(torch.uint8).view(-1)[:9].tolist()) == bytes([turn] * 9)
            other.add_(1)
            assert testing.state(x).where == "host", "from then on it moves like any other"
        del other, made, x


def test_custom_operators_of_the_python_interface():
    @torch.library.custom_op("tp_operators_py::scale_", mutates_args={"x"})
    def scale_(x: torch.Tensor, factor: float) -> None:
        x.mul_(factor)

    @torch.library.custom_op("tp_operators_py::cube", mutates_args=())
    def cube(x: torch.Tensor) -> torch.Tensor:
        return x * x * x

    def setup(ctx, inputs, output):  # noqa: ARG001
        ctx.save_for_backward(*inputs)

    cube.register_autograd(
        lambda ctx, grad: grad * 3 * ctx.saved_tensors[0] ** 2, setup_context=setup
    )

    def program():
        x = square(1)
        scale_(x, 3.0)
        leaf = square(2, requires_grad=True)
        cube(leaf * 2).sum().backward()
        return [x, leaf.grad]

    same_bits(program)


class Cube(torch.autograd.Function):
    """Saves an input and an intermediate result, and writes to a buffer by the way."""

    @staticmethod
    def forward(context, x, buffer):
        squared = x * x
        context.save_for_backward(x, squared)
        context.mark_dirty(buffer)
        buffer.add_(squared)
        context.set_materialize_grads(False)
        return squared * x, buffer

    @staticmethod
    def backward(context, grad, _):
        x, squared = context.saved_tensors
        return grad * squared * 3 + 0 * x, None


class OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(context, inputs, output):  # noqa: ARG004
        context.save_for_backward(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, grad):
        return grad * context.saved_tensors[0]

    @staticmethod
    def vmap(info, in_dims, x):  # noqa: ARG004
        return OnceDifferentiable.apply(x), in_dims[0]


def custom_functions():
    x, buffer = square(1, requires_grad=True), torch.zeros(SIDE, SIDE)
    out, changed = Cube.apply(x * 2, buffer)
    (out + OnceDifferentiable.apply(x)).sum().backward()
    rows = torch.vmap(OnceDifferentiable.apply)(square(2))
    return [x.grad, changed, buffer, rows]


# -- hooks -------------------------------------------------------------------------------------


def hooks():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE))
    seen = []

    def doubled(parameter):
        parameter.grad.mul_(2)

    handles = [
        model[0].register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
        model[0].register_forward_hook(lambda _m, _a, out: out + 1),
        model[2].register_full_backward_hook(lambda _m, gi, go: seen.extend([*gi, *go])),
        model[2].register_full_backward_pre_hook(lambda _m, go: (go[0] * 3,)),
        model[0].weight.register_hook(lambda grad: grad * 0.5),
        model[2].weight.register_post_accumulate_grad_hook(doubled),
    ]
    x = square(1, requires_grad=True)
    middle = model(x)
    middle.register_hook(lambda grad: grad + 1)
    middle.retain_grad()
    middle.grad_fn.register_hook(lambda gi, _go: gi)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t.shape) or t.clone(), lambda t: t * 1
    ):
        loss = (middle.sin() * middle).sum()
    loss.backward()
    for handle in handles:
        handle.remove()
    return [x.grad, middle.grad, *seen, [p.grad for p in model.parameters()], len(packed)]


# -- higher derivatives and transforms ---------------------------------------------------------


def double_backward():
    x = square(1, requires_grad=True)
    weight = square(2, requires_grad=True)
    loss = (torch.tanh(x @ weight) ** 2).sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    penalty = first.square().sum()
    grads = torch.autograd.grad(penalty, (x, weight), retain_graph=True)
    penalty.backward()
    small = square(3, 3, 3, dtype=torch.float64, requires_grad=True)
    ok = gradgradcheck(lambda t: t.sin() @ t, small)
    return [first, grads, x.grad, weight.grad, ok]


def functional_transforms():
    func = torch.func
    x, y = square(1, 12, 12), square(2, 12, 12)

    def f(t):
        return (t.sin() @ y).tanh().sum(0)

    _, pushed = func.jvp(f, (x,), (y,))
    _, pull = func.vjp(f, x)
    layer = nn.Linear(12, 3)
    nn.init.constant_(layer.weight, 0.1)
    nn.init.zeros_(layer.bias)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(params, row):
        return func.functional_call(layer, params, row).square().sum()

    each = torch.vmap(func.grad(loss), in_dims=(None, 0))(parameters, x)
    results = [pushed, pull(x[0]), func.jacrev(f)(x), func.jacfwd(f)(x), each]
    results += [func.hessian(lambda t: (t**3).sum())(x[:3, :3])]
    results += [torch.vmap(torch.vmap(torch.dot))(x.view(3, 4, 12), y.view(3, 4, 12))]
    results += [torch.vmap(lambda t: t + torch.rand(12), randomness="different")(x)]
    results += [
        func.linearize(f, x)[1](y),
        torch.vmap(torch.linalg.solve)(x.view(4, 6, 6)[:, :6], y.view(4, 6, 6)),
    ]
    return [*results, func.functionalize(lambda t: t.clone().add_(1))(x)]


def forward_mode():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(square(1), square(2))
        out = forward_ad.unpack_dual((dual @ dual.t()).exp())
        return [out.primal.clone(), out.tangent.clone()]


def checkpoints():
    from torch.utils.checkpoint import checkpoint

    results = []
    for reentrant in (True, False):
        x, weight = square(1, requires_grad=True), square(2, requires_grad=True)

        def block(t, w=weight):
            return nn.functional.dropout(torch.tanh(t @ w), 0.3)

        checkpoint(
            block, checkpoint(block, x, use_reentrant=reentrant), use_reentrant=reentrant
        ).sum().backward()
        results += [x.grad, weight.grad]
    return results


# -- recurrent and normalising layers ----------------------------------------------------------


def layers_with_state():
    torch.manual_seed(6)
    results = []
    x = square(1, 3, 8, 20, 20)[:, :, :, :]
    for norm in (
        nn.BatchNorm2d(8),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    ):
        for _ in range(3):
            norm(x + 1)
        norm.eval()
        results += [norm(x), norm.running_mean, norm.running_var, norm.num_batches_tracked]
    sequence = square(2, 7, 4, 16)
    for recurrent in (nn.LSTM(16, 24, 2, bidirectional=True), nn.GRU(16, 24), nn.RNN(16, 24)):
        out, _ = recurrent(sequence)
        out.sum().backward()
        results += [out, *(p.grad for p in recurrent.parameters())]
    for recurrent in (nn.LSTM(16, 24), nn.GRU(16, 24), nn.RNN(16, 24)):
        leaf = sequence.clone().requires_grad_()
        packed = nn.utils.rnn.pack_padded_sequence(leaf, torch.tensor([7, 5, 3, 1]))
        out, lengths = nn.utils.rnn.pad_packed_sequence(recurrent(packed)[0])
        out.sum().backward()
        results += [out, lengths, leaf.grad]
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
    for _ in range(3):
        results.append(spectral(sequence))
    results.append(nn.functional.rrelu(sequence, training=True))
    return [*results, nn.functional.embedding(torch.arange(6), square(3, 9, 5), max_norm=0.5)]


def composites_that_touch_memory():
    x, q = square(1), torch.linspace(0, 1, 9)
    results = [torch.quantile(x, 0.3), torch.quantile(x, 0.3, 1), torch.nanquantile(x, 0.7, 0)]
    results += [torch.quantile(x, q, 1), torch.nanquantile(x, q)]
    targets, sizes = torch.randint(1, 9, (4, 6)), torch.full((4,), 6)
    log_probs = square(2, 12, 4, 9).log_softmax(-1)
    results.append(nn.functional.ctc_loss(log_probs, targets, torch.full((4,), 12), sizes))
    sobol = torch.quasirandom.SobolEngine(40, scramble=True, seed=3)
    return [*results, sobol.draw(50), sobol.fast_forward(3).draw(50)]


def random_in_place():
    x = square(1)
    x.normal_().uniform_().bernoulli_(0.5)
    y = torch.empty(SIDE, SIDE).exponential_()
    generator = torch.Generator().manual_seed(4)
    return [
        x,
        y,
        torch.randperm(1000, generator=generator),
        torch.multinomial(y, 5),
        y.geometric_(0.5),
    ]


def inference():
    with torch.inference_mode():
        x = square(1)
        x.add_(1)
        y = x.view(-1)[::2]
        y.mul_(2)
        result = [x.clone(), nn.functional.linear(x, x)]
    return [*result, x * 2]


PROGRAMS = [
    views, writes_through_views, overlapping_storages, storages_that_change, out_arguments,
    in_place_operators, zero_size, foreach_lists, fused_lists, optional_and_undefined,
    no_storage, sparse_layouts, quantised_tensors, complex_tensors, narrow_dtypes,
    tensor_subclasses, modes, custom_functions, hooks, double_backward, functional_transforms,
    forward_mode, checkpoints, layers_with_state, composites_that_touch_memory,
    random_in_place, inference,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_program_has_the_same_bits_when_everything_is_evicted_before_each_operator(program):
    same_bits(program)
