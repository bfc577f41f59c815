"""Scenario 1: a twelve-layer transformer trained for 200 steps.

Source: activation offloading over streams gave NaN gradients after some steps, because a tensor
was freed while its copy was in flight (https://github.com/meta-pytorch/torchtune/issues/1867).

Setup: 12 layers, 200 steps, a budget of 50% of the peak.
Right: no NaN; loss and gradients equal the plain run's at each step (on a GPU gradients at each
tenth: there are 85 MB of them), and so do parameters and states in the end.
"""

import math

import torch
from places import KIB, Place
from workloads import Job, Transformer


def test_twelve_layers_train_200_steps_in_half_their_memory(place: Place) -> None:
    place.coarser(16 * KIB)
    width = place.pick(sim=32, cuda=384)
    job = Job(
        place,
        lambda: Transformer(width, 12),
        200,
        optimizer=torch.optim.SGD,
        options={"lr": 1e-2, "foreach": False},
        batch=place.pick(sim=(1, 16), cuda=(1, 64)),
        digest_every=place.pick(sim=1, cuda=10),
    )
    budget = job.peak() // 2
    plain = job.run()
    with place.paging(budget) as paging:
        paged = job.run()
        paging.assert_paged(evictions=200, fills=200)
    assert not any(math.isnan(float.fromhex(loss)) for loss in paged.losses)
    assert len(paged.losses) == job.steps
    assert paged.losses == plain.losses
    assert paged.gradients == plain.gradients
    assert paged == plain
