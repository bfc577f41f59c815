"""Scenario 15: a loss scaler that skips a step, and a norm over all gradients.

Source: with offloaded gradients the scaler's step took for ever
(https://github.com/pytorch/pytorch/issues/82206) and the norm was computed on another device
(https://github.com/pytorch/pytorch/issues/148532).

Setup: GradScaler with an inf step, clip_grad_norm_ over all gradients, at 40% of the peak.
Right: the step is skipped, the scale halves, and everything equals the plain run.
"""

import math

import torch
from places import Place, gradients, states
from torch import nn
from torch.nn import functional
from workloads import Job, Transformer

STEPS, BROKEN_STEP = 6, 2


def train(job: Job) -> list[object]:
    place = job.place
    torch.manual_seed(15)
    with place.device:
        model = job.make()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    scaler = torch.amp.GradScaler(place.device.type, init_scale=1024.0, growth_interval=1000)
    found: list[object] = []
    for step in range(STEPS):
        inputs, targets = job.data(step)
        logits = model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if step == BROKEN_STEP:
            loss = loss * math.inf
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        found += [norm.item().hex(), scaler.get_scale(), place.digest(gradients(model))]
    assert scaler.get_scale() == 512.0
    assert next(iter(optimizer.state.values()))["step"] == STEPS - 1
    return [*found, place.digest(model.parameters()), place.digest(states(optimizer))]


def test_skipped_step_and_clipping_have_plain_bits(place: Place) -> None:
    width, batch = place.pick(sim=(32, (2, 32)), cuda=(512, (4, 256)))
    job = Job(place, lambda: Transformer(width, 4), STEPS, batch=batch)
    budget = place.peak(lambda: train(job)) * 4 // 10
    plain = train(job)
    with place.paging(budget) as paging:
        paged = train(job)
        paging.assert_paged(evictions=STEPS, fills=STEPS)
    assert paged == plain
