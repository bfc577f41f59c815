"""Scenario 11: a mixture of experts, with another program in between.

Source: a prefetcher that had recorded one order of modules broke when other experts were chosen
(https://github.com/deepspeedai/DeepSpeed/issues/4808).

Setup: random routing; evaluation and generation every 10 steps; a smaller last batch.
Right: the plain run's bits, no hang.
"""

import torch
from places import Place, gradients, states
from torch import nn
from torch.nn import functional
from workloads import VOCABULARY

STEPS = 40
EPOCH = 7


class Experts(nn.Module):
    """Each token goes to one expert, which the noise decides as much as the token."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1)
        noise = torch.rand(scores.shape, device="cpu").to(x.device)
        chosen = (scores + noise).argmax(-1)
        parts = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(1)
            if rows.numel():
                out = expert(x.index_select(0, rows)) * scores[rows, index].unsqueeze(1)
                parts = parts.index_copy(0, rows, out)
        return x + parts


class Model(nn.Module):
    """Two layers of experts over tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Experts(width, 4) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens.flatten())
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@torch.no_grad()
def evaluate_and_generate(place: Place, model: nn.Module) -> list[str]:
    model.eval()
    tokens = torch.arange(VOCABULARY, device=place.device)
    found = [place.digest([model(tokens)])]
    text = torch.zeros(1, dtype=torch.int64, device=place.device)
    for _ in range(6):
        text = torch.cat([text, model(text)[-1:].argmax(-1)])
    model.train()
    return [*found, place.digest([text])]


def train(place: Place) -> list[str]:
    torch.manual_seed(11)
    width = place.pick(sim=32, cuda=1024)
    with place.device:
        model = Model(width)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        last = step % EPOCH == EPOCH - 1
        tokens = torch.randint(VOCABULARY, (13 if last else 48,)).to(place.device)
        loss = functional.cross_entropy(model(tokens), tokens.roll(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [loss.item().hex(), place.digest(gradients(model))]
        if step % 10 == 9:
            found += evaluate_and_generate(place, model)
    return [*found, place.digest(model.parameters()), place.digest(states(optimizer))]


def test_random_routing_and_other_programs_between_have_plain_bits(place: Place) -> None:
    budget = place.peak(lambda: train(place)) // 2
    plain = train(place)
    with place.paging(budget) as paging:
        paged = train(place)
        paging.assert_paged(evictions=STEPS, fills=STEPS)
    assert paged == plain
