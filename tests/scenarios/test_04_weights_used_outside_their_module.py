"""Scenario 4: weights that are used without calling their module.

Source: offloading by module hooks misses a weight that another module reads directly
(https://github.com/huggingface/transformers/pull/48409) and a Parameter that no submodule owns
(https://github.com/huggingface/accelerate/issues/767): the tensor stays on the meta device.

Setup: a module reads another module's weight, and the root has a Parameter of its own, at 45%.
Right: works, with the plain run's bits.
"""

import torch
from places import Place
from torch import nn
from torch.nn import functional
from workloads import VOCABULARY, Job


class Borrower(nn.Module):
    """Uses a weight that belongs to a sibling, without calling the sibling."""

    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self.owner = [owner]  # in a list: not a submodule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.owner[0].weight.t())


class Root(nn.Module):
    """Owns a Parameter itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.borrowers = nn.ModuleList(Borrower(layer) for layer in self.layers)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer, borrower in zip(self.layers, self.borrowers, strict=True):
            x = torch.tanh(borrower(torch.tanh(layer(x @ self.mixing))))
        return self.head(x)


def test_weights_read_by_others_and_owned_by_the_root_are_right(place: Place) -> None:
    width = place.pick(sim=64, cuda=2048)
    job = Job(place, lambda: Root(width), 8)
    budget = job.peak() * 45 // 100
    plain = job.run()
    with place.paging(budget) as paging:
        paged = job.run()
        paging.assert_paged(evictions=8, fills=8)
    assert paged == plain
