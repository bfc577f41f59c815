"""Scenario 8: tools that look for the largest batch recognise our error.

Source: accelerate did not take an out-of-memory error of another text for one
(https://github.com/huggingface/accelerate/issues/3803); Lightning's finder has its own rule
(https://github.com/Lightning-AI/pytorch-lightning/issues/1615).

Setup: an operator larger than budget and host together inside a train step, under accelerate's
``find_executable_batch_size`` and under Lightning's ``BatchSizeFinder``.
Right: both recognise the error, go on with smaller batches and finish.
"""

import warnings
from pathlib import Path

import pytest
import torch
from places import KIB, MIB, Place
from torch import nn

import torchpager


def sizes(place: Place) -> tuple[int, int]:
    """Return the bytes of budget and of host memory, and the bytes of one row of a batch."""
    return place.pick(sim=(512 * KIB, 32 * KIB), cuda=(128 * MIB, 8 * MIB))


class Wide(nn.Module):
    """Its output has one row of the given size for each sample."""

    def __init__(self, row_bytes: int) -> None:
        super().__init__()
        self.up = nn.Linear(1, row_bytes // 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).square().mean()


def test_accelerate_recognises_the_error_and_finds_a_batch(place: Place) -> None:
    memory = pytest.importorskip("accelerate.utils.memory")
    budget, row_bytes = sizes(place)
    tried: list[int] = []
    # The rows of this batch take more than budget and host together.
    start = 64

    @memory.find_executable_batch_size(starting_batch_size=start)
    def train(batch_size: int) -> float:
        tried.append(batch_size)
        with place.device:
            model = Wide(row_bytes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(torch.ones(batch_size, 1, device=place.device))
        loss.backward()
        optimizer.step()
        return loss.item()

    with place.paging(budget, host=budget) as paging:
        loss = train()
        assert loss > 0
        assert tried[0] == start
        assert len(tried) > 1
        assert tried == sorted(tried, reverse=True)
        assert paging.stats().ooms >= len(tried) - 1
        failed = torchpager.last_oom()
        assert failed is not None
        assert failed.requested_bytes >= row_bytes
        paging.assert_within()


def test_lightning_recognises_the_error_and_finds_a_batch(place: Place, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    budget, row_bytes = sizes(place)
    tried: list[int] = []

    class Module(lightning.LightningModule):
        """A module with the attribute that the finder changes."""

        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.wide = Wide(row_bytes)

        def train_dataloader(self) -> torch.utils.data.DataLoader:
            return torch.utils.data.DataLoader(torch.ones(512, 1), batch_size=self.batch_size)

        def training_step(self, batch: torch.Tensor, _index: int) -> torch.Tensor:
            tried.append(len(batch))
            return self.wide(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with warnings.catch_warnings(), place.paging(budget, host=budget) as paging:
        warnings.simplefilter("ignore")
        finder = lightning.callbacks.BatchSizeFinder(
            mode="power", steps_per_trial=1, init_val=2, max_trials=9
        )
        module = Module()
        trainer = lightning.Trainer(
            accelerator=place.pick(sim="cpu", cuda="cuda"), devices=1, max_steps=1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path, callbacks=[finder],
        )  # fmt: skip
        trainer.fit(module)
        assert trainer.state.finished
        assert paging.stats().ooms > 0
        assert 2 <= module.batch_size < max(tried)
        assert tried[-1] == module.batch_size
        paging.assert_within()
        del trainer, module, finder
