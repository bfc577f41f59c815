"""Scenario 2: a tensor and three views of it are saved for backward.

Source: activation offloading copies each saved view on its own, though they share a storage
(https://github.com/pytorch/torchtitan/pull/3521 replays views for that reason).

Setup: save a tensor, its transpose, a narrow and a reshaped view of it; page it out; backward.
Right: gradients equal, and its bytes went to the host once and came back once.
"""

import torch
from places import Place, address

import torchpager
from torchpager import testing


def forward(
    x: torch.Tensor, weights: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a loss whose graph saves one tensor four times, and that tensor."""
    w, v, u = weights
    saved = x + 1
    loss = (
        (saved * w).sum()
        + (saved.t() @ v).sum()
        + (saved.narrow(0, 1, saved.shape[0] - 2) * u).sum()
        + saved.reshape(-1).square().sum()
    )
    return loss, saved.detach()


def make(place: Place) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the input and the weights."""
    torch.manual_seed(2)
    rows, columns = place.pick(sim=(128, 64), cuda=(2048, 1024))
    shapes = [(rows, columns), (rows, columns), (rows, columns), (rows - 2, columns)]
    x, *weights = (torch.randn(shape, device=place.device) for shape in shapes)
    return x.requires_grad_(), tuple(w.requires_grad_() for w in weights)


def step(place: Place) -> str:
    """Return the digest of all gradients."""
    x, weights = make(place)
    loss, _ = forward(x, weights)
    loss.backward()
    return place.digest([x.grad, *(w.grad for w in weights)])


def test_one_storage_saved_four_times_moves_once(place: Place) -> None:
    budget = 3 * place.peak(lambda: step(place))
    plain = step(place)
    with place.paging(budget) as paging:
        x, weights = make(place)
        loss, saved = forward(x, weights)
        size = testing.state(saved).resident_bytes
        before = paging.stats()
        testing.evict(saved)
        assert testing.state(saved).where == "host"
        place.scribble(size)
        out = torchpager.stats()
        assert out.write_backs.bytes - before.write_backs.bytes == size
        assert out.evictions.bytes - before.evictions.bytes == size
        where = address(saved)
        loss.backward()
        place.synchronize()
        after = torchpager.stats()
        assert after.fills.bytes - out.fills.bytes == size
        assert after.write_backs.bytes == out.write_backs.bytes
        assert address(saved) == where
        assert place.digest([x.grad, *(w.grad for w in weights)]) == plain
        paging.assert_paged()
        del x, weights, loss, saved
