"""Scenario 10: free memory in holes, then one large block.

Source: an allocation fails while more than it needs is free, in pieces between live blocks
(https://github.com/pytorch/pytorch/issues/35901).

Setup: allocate A B A B ... up to the budget, free all B, then ask for 70% of it at once.
Right: it succeeds, and every A keeps its values.
"""

import torch
from places import Place

PAIRS = 24


def test_large_block_fits_after_every_second_one_was_freed(place: Place) -> None:
    size = place.pick(sim=4, cuda=2) * place.granule
    with place.paging(2 * PAIRS * size) as paging:
        room = paging.budget_bytes - paging.native_bytes
        kept, freed = [], []
        for value in range(room // (2 * size)):
            kept.append(torch.full((size // 4,), float(value), device=place.device))
            freed.append(torch.full((size // 4,), -1.0, device=place.device))
        freed.clear()
        count = room * 7 // 10 // 4
        large = torch.full((count,), 5.0, device=place.device)
        assert large.min().item() == large.max().item() == 5.0
        for value, tensor in enumerate(kept):
            assert tensor.min().item() == tensor.max().item() == value
        paging.assert_paged()
        assert paging.stats().ooms == 0
        assert len(kept) >= PAIRS - 1
        del kept, large, tensor
