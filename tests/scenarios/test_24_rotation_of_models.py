"""Scenario 24: several models in turn, none of which fits beside another.

Source: memory in use grew with every change of the model
(https://github.com/lllyasviel/stable-diffusion-webui-forge/issues/1598).

Setup: 50 rotations between three models that each need 80% of the budget.
Right: the bytes held and the outputs are the same in each rotation.
"""

import torch
from places import KIB, SMALL_SLACK_BYTES, Place
from torch import nn

ROTATIONS, WARM_UP = 50, 5


@torch.no_grad()
def test_fifty_rotations_hold_the_same_and_give_the_same(place: Place) -> None:
    place.coarser(16 * KIB)
    width, layers = place.pick(sim=(64, 8), cuda=(2048, 8))
    weights = layers * width * width * 4
    torch.manual_seed(24)

    def model() -> nn.Module:
        parts = [nn.Linear(width, width, bias=False) for _ in range(layers)]
        return nn.Sequential(*(part for layer in parts for part in (layer, nn.Tanh())))

    plain = [model() for _ in range(3)]
    inputs = torch.randn(4, width)
    expected = [place.digest([net.to(place.device)(inputs.to(place.device))]) for net in plain]
    plain = [net.cpu() for net in plain]
    with place.paging(weights * 10 // 8, native_slack=SMALL_SLACK_BYTES) as paging:
        with place.device:
            models = [model() for _ in range(3)]
        for source, target in zip(plain, models, strict=True):
            target.load_state_dict(source.state_dict())
        inputs = inputs.to(place.device)
        warm = paging.stats()
        for turn in range(ROTATIONS):
            assert [place.digest([net(inputs)]) for net in models] == expected
            if turn == WARM_UP:
                warm = paging.stats()
        last = paging.assert_paged(evictions=ROTATIONS, fills=ROTATIONS)
        assert last.reserved.peak == warm.reserved.peak
        assert last.host_bytes.current == warm.host_bytes.current
        assert last.host_bytes.peak == warm.host_bytes.peak
        assert last.allocated.current == warm.allocated.current
        assert last.evictions.count > warm.evictions.count
        del models, target
