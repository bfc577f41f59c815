"""Programs as users of several libraries write them. Nothing here knows of torchpager.

Each is a function of a device and of whether it is to be large; it returns what it has to show:
tensors, numbers and lists of both. They make their own data, from fixed seeds.
"""

import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

Shown = dict[str, Any]
STEPS = 6


def shown(model: nn.Module, **others: Any) -> Shown:
    """Return the parameters and buffers of a model, and others."""
    return {**model.state_dict(), **others}


def token_batches(
    count: int, batch: int, length: int, vocabulary: int
) -> Iterator[torch.Tensor]:
    """Yield batches of token numbers, on the CPU."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        yield torch.randint(0, vocabulary, (batch, length), generator=generator)


# ---- language models -------------------------------------------------------------------------


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Token numbers and labels, as a Trainer wants them."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self._rows = next(token_batches(1, count, length, vocabulary))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def llama(large: bool) -> Any:
    """Return a Llama without weights from anywhere."""
    import transformers

    sizes = (1024, 2816, 8, 16) if large else (64, 128, 2, 4)
    width, inner, layers, heads = sizes
    config = transformers.LlamaConfig(
        vocab_size=16000 if large else 128,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=1024,
    )
    return transformers.LlamaForCausalLM(config)


def trainer(device: str, large: bool) -> Shown:
    """Train with transformers' Trainer: accumulation, clipping, a schedule, evaluation."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    model = llama(large)
    length, vocabulary = (512, 16000) if large else (32, 128)
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=STEPS,
            learning_rate=1e-3,
            warmup_steps=2,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=device == "cpu",
            seed=5,
        )
        run = transformers.Trainer(
            model,
            arguments,
            train_dataset=Sentences(64, length, vocabulary),
            eval_dataset=Sentences(8, length, vocabulary),
        )
        run.train()
        losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
        found = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    return shown(model, losses=losses, evaluations=found)


def lora(device: str, large: bool) -> Shown:
    """Adapt a frozen Llama with peft's LoRA."""
    import peft

    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(llama(large), config).to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    length, vocabulary = (512, 16000) if large else (32, 128)
    losses = []
    for codes in token_batches(STEPS, 8 if large else 4, length, vocabulary):
        codes = codes.to(device)
        loss = model(input_ids=codes, labels=codes, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return shown(model, losses=losses)


def generation(device: str, large: bool) -> Shown:
    """Generate greedily, with a key-value cache that grows by a token at a time."""
    model = llama(large).to(device).eval()
    length, vocabulary = (256, 16000) if large else (16, 128)
    prompt = next(token_batches(1, 16 if large else 4, length, vocabulary)).to(device)
    with torch.no_grad():
        codes = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=64 if large else 24,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
            eos_token_id=None,
        )
    return {"tokens": codes}


# ---- other trainers --------------------------------------------------------------------------


def perceptron(width: int, classes: int) -> nn.Sequential:
    """Return a few linear layers with norms between."""
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def labelled(count: int, width: int, classes: int) -> TensorDataset:
    """Return random rows with random labels."""
    generator = torch.Generator().manual_seed(4)
    return TensorDataset(
        torch.randn(count, width, generator=generator),
        torch.randint(0, classes, (count,), generator=generator),
    )


def lightning(device: str, large: bool) -> Shown:
    """Train with Lightning's Trainer, with validation and a schedule."""
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    width, batch = (4096, 4096) if large else (64, 64)

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = perceptron(width, 10)
            self.losses: list[float] = []

        def _loss(self, batch: Any) -> torch.Tensor:
            return functional.cross_entropy(self.net(batch[0]), batch[1])

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = self._loss(batch)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.losses.append(self._loss(batch).item())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    model = Classifier()
    data = DataLoader(labelled(batch * STEPS, width, 10), batch)
    run = pl.Trainer(
        max_epochs=1,
        accelerator="cpu" if device == "cpu" else "gpu",
        devices=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    run.fit(model, data, DataLoader(labelled(batch, width, 10), batch))
    return shown(model, losses=model.losses)


def accelerate(device: str, large: bool) -> Shown:
    """Train with accelerate: gradients over several batches, clipped."""
    from accelerate import Accelerator

    width, batch = (4096, 2048) if large else (64, 32)
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=device == "cpu")
    model = perceptron(width, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = DataLoader(labelled(batch * 4 * STEPS, width, 10), batch)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    for rows, labels in data:
        with accelerator.accumulate(model):
            loss = functional.cross_entropy(model(rows), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return shown(accelerator.unwrap_model(model), losses=losses)


# ---- other shapes ----------------------------------------------------------------------------


def detection(device: str, large: bool) -> Shown:
    """Train torchvision's Faster R-CNN on pictures of several sizes."""
    from torchvision.models import detection as models

    side = 512 if large else 96
    make = models.fasterrcnn_resnet50_fpn if large else models.fasterrcnn_mobilenet_v3_large_fpn
    model = make(
        weights=None, weights_backbone=None, num_classes=5, min_size=side, max_size=2 * side
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    generator = torch.Generator().manual_seed(6)
    losses = []
    for step in range(4):
        pictures, targets = [], []
        for i in range(4 if large else 2):
            high, wide = side + 16 * ((step + i) % 3), side + 24 * ((2 * step + i) % 3)
            pictures.append(torch.rand(3, high, wide, generator=generator).to(device))
            corners = torch.rand(3, 2, generator=generator) * side / 2
            boxes = torch.cat([corners, corners + side / 4], 1).to(device)
            labels = torch.randint(1, 5, (3,), generator=generator).to(device)
            targets.append({"boxes": boxes, "labels": labels})
        loss = sum(model(pictures, targets).values())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return shown(model, losses=losses)


def graphs(device: str, large: bool) -> Shown:
    """Train a graph network of torch-geometric on one random graph."""
    from torch_geometric.nn import GCNConv

    nodes, edges, width = (200_000, 2_000_000, 128) if large else (400, 2_000, 32)
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(nodes, width, generator=generator).to(device)
    ends = torch.randint(0, nodes, (2, edges), generator=generator).to(device)
    labels = torch.randint(0, 10, (nodes,), generator=generator).to(device)
    layers = nn.ModuleList(
        [GCNConv(width, width), GCNConv(width, width), GCNConv(width, 10)]
    ).to(device)
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        h = x
        for layer in layers[:-1]:
            h = functional.dropout(layer(h, ends).relu(), 0.2)
        loss = functional.cross_entropy(layers[-1](h, ends), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return shown(layers, losses=losses)


class Poles:
    """Many carts with a pole each, at once; what to push is decided for all of them."""

    def __init__(self, count: int, device: str) -> None:
        self.state = torch.zeros(count, 4, device=device)
        self._random = torch.Generator().manual_seed(9)

    def step(self, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Push; return the states after it, rewards, and which have fallen and begin anew."""
        x, v, angle, turn = self.state.unbind(1)
        force = actions.float() * 20 - 10
        pull = (force + 0.05 * turn**2 * angle.sin()) / 1.1
        gain = 9.8 * angle.sin() - angle.cos() * pull
        bend = gain / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        push = pull - 0.05 * bend * angle.cos() / 1.1
        after = torch.stack(
            [x + 0.02 * v, v + 0.02 * push, angle + 0.02 * turn, turn + 0.02 * bend], 1
        )
        fallen = (after[:, 0].abs() > 2.4) | (after[:, 2].abs() > 0.21)
        fresh = (torch.rand(after.shape, generator=self._random) - 0.5).to(after.device) / 10
        self.state = torch.where(fallen[:, None], fresh, after)
        return after, (~fallen).float(), fallen


def deep_q(device: str, large: bool) -> Shown:
    """Learn Q values from a replay buffer on the device, with a slowly moving target."""
    carts, capacity, width = (4096, 1 << 21, 2048) if large else (64, 1024, 64)
    poles = Poles(carts, device)
    net, target = (
        nn.Sequential(
            nn.Linear(4, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 2),
        ).to(device)
        for _ in range(2)
    )
    target.load_state_dict(net.state_dict())
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    before, after = (torch.zeros(capacity, 4, device=device) for _ in range(2))
    actions = torch.zeros(capacity, dtype=torch.long, device=device)
    rewards, ended = (torch.zeros(capacity, device=device) for _ in range(2))
    generator = torch.Generator().manual_seed(10)
    losses = []
    for turn in range(24):
        with torch.no_grad():
            choice = net(poles.state).argmax(1)
        explore = (torch.rand(carts, generator=generator) < 0.2).to(device)
        random = torch.randint(0, 2, (carts,), generator=generator).to(device)
        choice = torch.where(explore, random, choice)
        place = torch.arange(turn * carts, (turn + 1) * carts, device=device) % capacity
        before[place], actions[place] = poles.state, choice
        after[place], rewards[place], fallen = poles.step(choice)
        ended[place] = fallen.float()
        known = min(capacity, (turn + 1) * carts)
        batch = torch.randint(0, known, (carts,), generator=generator).to(device)
        with torch.no_grad():
            worth = rewards[batch] + 0.99 * (1 - ended[batch]) * target(after[batch]).amax(1)
        found = net(before[batch]).gather(1, actions[batch, None]).squeeze(1)
        loss = functional.smooth_l1_loss(found, worth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), net.parameters(), strict=True):
                slow.lerp_(fast, 0.05)
        losses.append(loss.item())
    assert all(map(math.isfinite, losses))
    return shown(net, losses=losses, states=poles.state, buffer=before)


PROGRAMS: dict[str, tuple[Callable[[str, bool], Shown], tuple[str, ...]]] = {
    "detection": (detection, ("torchvision",)),  # it takes longest
    "trainer": (trainer, ("transformers", "accelerate")),
    "lightning": (lightning, ("lightning",)),
    "accelerate": (accelerate, ("accelerate",)),
    "lora": (lora, ("transformers", "peft")),
    "graphs": (graphs, ("torch_geometric",)),
    "deep_q": (deep_q, ()),
    "generation": (generation, ("transformers",)),
}
"""By name, with the packages that each needs."""

warnings.filterwarnings("ignore")
