"""Scenario 7: the first optimizer step makes more state than there is room for.

Source: a batch that fits with SGD runs out of memory with Adam, whose state appears in the
first ``step()`` (https://github.com/pytorch/pytorch/issues/9439).

Setup: room for weights, gradients and one Adam moment; the first step creates both.
Right: it completes, the step counter is 1, parameters and moments equal the plain run's.
"""

import pytest
import torch
from places import Place, states
from torch import nn


def first_step(place: Place, foreach: bool) -> tuple[list[float], str, str]:
    """Return the step counters, and digests of parameters and moments."""
    torch.manual_seed(7)
    width, layers = place.pick(sim=(64, 12), cuda=(1024, 32))
    with place.device:
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        inputs = torch.randn(4, width)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    model(inputs).square().mean().backward()
    optimizer.step()
    steps = [float(state["step"]) for state in optimizer.state.values()]
    return steps, place.digest(model.parameters()), place.digest(states(optimizer))


@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
def test_first_step_completes_with_room_for_one_moment(place: Place, foreach: bool) -> None:
    width, layers = place.pick(sim=(64, 12), cuda=(1024, 32))
    weights = layers * width * width * 4
    plain = first_step(place, foreach)
    with place.paging(3 * weights + 2 * place.granule) as paging:
        paged = first_step(place, foreach)
        paging.assert_paged(evictions=1, fills=0)
        assert paging.stats().host_bytes.peak > 0
    assert paged[0] == [1.0] * layers
    assert paged == plain
