"""Scenario 3: tied embedding and head, and a view from before.

Source: offloading a model untied its embedding and head, since each got a copy of its own
(https://github.com/huggingface/accelerate/issues/993); with a layer-wise offloader the two
owners' copies got into each other's way (https://github.com/vipshop/cache-dit/pull/1111).

Setup: embedding and head share a weight; take a view of it, train with many evictions, read it.
Right: the view shows the current values at the same data_ptr; everything equals the plain run.
"""

import torch
from places import Place, address, gradients
from torch import nn
from torch.nn import functional

from torchpager import testing

STEPS = 6


class Tied(nn.Module):
    """Embedding and head are one parameter."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.mix = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, rows, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.mix:
            x = functional.gelu(layer(x))
        return self.head(x)


def train(place: Place, paged: bool) -> list[str]:
    torch.manual_seed(5)
    rows, width = place.pick(sim=(256, 64), cuda=(4096, 1024))
    with place.device:
        model = Tied(rows, width)
    view = model.embed.weight.detach().t()[:, 1:]
    where = address(view)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(rows, (2, 17), generator=generator).to(place.device)
        loss = functional.cross_entropy(
            model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        if paged:
            testing.page_out_all()
        optimizer.step()
        assert address(view) == where
        assert view.data_ptr() == where
        assert torch.equal(view, model.head.weight.detach().t()[:, 1:])
        found += [loss.item().hex(), place.digest([view]), place.digest(gradients(model))]
    assert model.head.weight is model.embed.weight
    return found


def test_view_taken_before_evictions_shows_current_values(place: Place) -> None:
    budget = place.peak(lambda: train(place, paged=False)) * 6 // 10
    plain = train(place, paged=False)
    with place.paging(budget) as paging:
        paged = train(place, paged=True)
        paging.assert_paged(evictions=STEPS, fills=STEPS)
    assert paged == plain
