"""Programs whose bits must be the same with and without drops, and what runs them."""

import contextlib
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import torchpager
from torchpager import _torch_cpu, recompute

SMALL = {"large_min": "4 KiB", "granularity": "4 KiB"}


@contextlib.contextmanager
def forced(budget="6 MiB", host=None, device="64 MiB", park=False, strict=False):
    """Drop whatever may be dropped, or park it, as soon as it may be. Yields what counts it."""
    recompute.force(True, park=park)
    _torch_cpu.hook_forced(2)
    try:
        with (
            torchpager.simulate(device, strict=strict, **SMALL),
            torchpager.budget(budget),
            torchpager.auto_offload(recompute=True, host=host),
        ):
            wait_until_something_drops(park)
            yield Drops(park)
    finally:
        _torch_cpu.hook_forced(0)
        recompute.force(False)


def wait_until_something_drops(park=False):
    """Nothing does for some milliseconds after arming, while the gate is closed."""
    drops, deadline = Drops(park), time.monotonic() + 20
    while not drops.count:
        assert time.monotonic() < deadline, "nothing is dropped"
        x = torch.ones(32, 64, requires_grad=True)
        loss = torch.exp(x).sum()
        operators(1)
        del loss


class Drops:
    """What was dropped, or parked, and made again, since this was made."""

    def __init__(self, park=False):
        self._name = "parks" if park else "drops"
        self._before = torchpager.stats()

    @property
    def count(self):
        now, before = torchpager.stats(), self._before
        return getattr(now, self._name).count - getattr(before, self._name).count

    @property
    def reruns(self):
        return torchpager.stats().reruns.count - self._before.reruns.count


def operators(count=3):
    """Run some operators that have nothing to do with anything: drops are tried before each."""
    x = torch.zeros(8)
    for _ in range(count):
        x = x + 1


def bits(value):
    """The same bits, whatever becomes of the value; NaN is NaN."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1)
        return (tuple(value.shape), value.dtype, bytes(flat.view(torch.uint8).tolist()))
    return value


def all_bits(values):
    return [bits(value) for value in pytree.tree_leaves(values)]


def run(program, seed=0):
    torch.manual_seed(seed)
    return all_bits(program())


# ---- models and data -------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout
        )
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + functional.dropout(
            self.down(functional.gelu(self.up(self.norm2(x)))), self.dropout
        )


class GPT(nn.Module):
    def __init__(self, *, width=64, layers=2, dropout=0.0, reentrant=None):
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.head = nn.Linear(width, 64)
        self.reentrant = reentrant

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = functional.relu(self.norm(self.conv(x)), inplace=True)
        y = functional.silu(self.norm2(self.conv2(x)))
        return self.head(functional.max_pool2d(x + y, 4).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(32, 32, 2), nn.Linear(32, 32)

    def forward(self, x):
        return self.head(torch.tanh(self.lstm(x.view(8, 8, 32))[0])).view(64, 32)


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(32, 32)

    def forward(self, x):
        hidden = torch.zeros(64, 32)
        for _ in range(12):
            hidden = torch.sigmoid(self.cell(x, hidden))
        return hidden


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.second(torch.sigmoid(Square.apply(torch.sin(self.first(x)))))


def mlp():
    return nn.Sequential(
        nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)
    )


def bias_free():
    return nn.Sequential(
        nn.Linear(32, 64, bias=False), nn.SiLU(), nn.Linear(64, 32, bias=False)
    )


def tokens():
    return torch.randint(0, 64, (2, 32)), torch.randint(0, 64, (2, 32))


def images():
    return torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))


def vectors():
    return torch.randn(64, 32), torch.randn(64, 32)


def sequences():
    return torch.randn(4, 16, 32), torch.randn(4, 16, 32)


def cross_entropy(model, x, y):
    return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())


def squares(model, x, y):
    return functional.mse_loss(model(x), y)


def train(
    make,
    data,
    loss_of=squares,
    *,
    steps=3,
    amp=False,
    optimizer=torch.optim.AdamW,
    accumulate=1,
    around=None,
    **options,
):
    """A program: losses, parameters, gradients and buffers of a training."""

    def program():
        torch.manual_seed(1)
        model = make()
        optim = optimizer(model.parameters(), 1e-2, **options)
        losses, gradients = [], []
        for step in range(steps):
            for _ in range(accumulate):
                x, y = data()
                with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                    loss = loss_of(model, x, y)
                if around is not None:
                    loss = around(loss, model)
                loss.backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optim.step()
            optim.zero_grad(set_to_none=step % 2 == 0)
            losses.append(loss.item())
        return losses, gradients, list(model.parameters()), list(model.buffers())

    return program
