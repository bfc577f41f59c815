"""Scenario 18: what one tensor takes on the host.

Source: page-locked allocations are rounded up to the next power of two, so that a little more
than one takes twice as much (https://github.com/pytorch/pytorch/pull/171662,
https://github.com/vllm-project/vllm/issues/56410).

Setup: page out one tensor of 2.25 x 2^k bytes.
Right: host memory grows by its bytes and at most one granule.
"""

import os

import pytest
import torch
from places import Place

from torchpager import _core, testing


@pytest.mark.parametrize("doublings", [1, 3, 5])
@pytest.mark.parametrize("odd", [0, 4], ids=["whole", "odd"])
def test_host_grows_by_the_payload_and_a_granule(
    place: Place, doublings: int, odd: int
) -> None:
    payload = place.granule * 9 // 4 * 2**doublings + odd
    with place.paging(8 * payload) as paging:
        tensor = torch.full((payload // 4,), 18.0, device=place.device)
        before = paging.stats().host_bytes.current
        testing.evict(tensor)
        grown = paging.stats().host_bytes.current - before
        assert payload <= grown <= payload + place.granule
        assert paging.stats().host_bytes.peak == before + grown
        if place.simulated:  # as the operating system sees it
            assert os.fstat(_core.sim_fd("host")).st_blocks * 512 == before + grown
        place.scribble(payload)
        assert tensor.min().item() == tensor.max().item() == 18.0
        paging.assert_paged()
        del tensor
