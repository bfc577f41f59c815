"""Scenario 14: random numbers and recomputation.

Source: checkpointed segments drew other dropout masks in their second forward pass
(https://github.com/pytorch/pytorch/pull/14253, https://github.com/allenai/OLMo-core/pull/828).

Setup: dropout inside activation checkpointing, reentrant and not, in 45% of the peak.
Right: the same bits as without the budget, and as without checkpointing.
"""

import pytest
import torch
from places import Place
from torch import nn
from torch.utils.checkpoint import checkpoint
from workloads import Job, Transformer


def forward(model: nn.Module, tokens: torch.Tensor, reentrant: bool) -> torch.Tensor:
    """Run the model with each block checkpointed."""
    assert isinstance(model, Transformer)
    x = model.embed(tokens)
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    return model.head(x)


@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_checkpointed_dropout_has_plain_bits(place: Place, reentrant: bool) -> None:
    width, batch = place.pick(sim=(32, (4, 64)), cuda=(512, (8, 256)))
    job = Job(
        place,
        lambda: Transformer(width, 4, dropout=0.2),
        5,
        batch=batch,
        forward=lambda model, tokens: forward(model, tokens, reentrant),
    )
    budget = job.peak() * 45 // 100
    whole = Job(place, job.make, job.steps, batch=batch).run()
    plain = job.run()
    assert plain == whole
    with place.paging(budget) as paging:
        paged = job.run()
        paging.assert_paged(evictions=5, fills=5)
    assert paged == plain
