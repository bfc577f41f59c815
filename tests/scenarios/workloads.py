"""Models and training loops that several scenarios share. Plain PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from places import Place, gradients, states
from torch import nn
from torch.nn import functional

VOCABULARY = 96


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self, width: int, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(seen.transpose(1, 2).reshape(batch, time, width)))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    """A small decoder."""

    def __init__(self, width: int, layers: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, dropout=dropout) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens (batch, time) to logits."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Trained:
    """What a run gave, as bytes."""

    losses: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    """A digest of all gradients after each step, or after some."""
    parameters: str = ""
    states: str = ""


@dataclass(frozen=True)
class Job:
    """A training program, the same inside and outside the contexts."""

    place: Place
    make: Callable[[], nn.Module]
    steps: int
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    options: dict[str, object] = field(default_factory=lambda: {"lr": 1e-3, "foreach": False})
    batch: tuple[int, int] = (2, 32)
    forward: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda model, x: model(x)
    """``forward(model, tokens)`` gives the logits."""
    digest_every: int = 1
    """Steps from one digest of the gradients to the next."""

    def data(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of a step."""
        generator = torch.Generator().manual_seed(1000 + step)
        batch, time = self.batch
        tokens = torch.randint(VOCABULARY, (batch, time + 1), generator=generator)
        return tokens[:, :-1].to(self.place.device), tokens[:, 1:].to(self.place.device)

    def loss(self, model: nn.Module, step: int) -> torch.Tensor:
        """Run the forward pass of a step."""
        inputs, targets = self.data(step)
        logits = self.forward(model, inputs)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def run(self, steps: int | None = None) -> Trained:
        """Train from the seed; compare what this returns."""
        torch.manual_seed(3)
        with self.place.device:
            model = self.make()
        optimizer = self.optimizer(model.parameters(), **self.options)
        result = Trained()
        for step in range(steps or self.steps):
            torch.manual_seed(100 + step)
            loss = self.loss(model, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            result.losses.append(loss.item().hex())
            if step % self.digest_every == 0:
                result.gradients.append(self.place.digest(gradients(model)))
        result.parameters = self.place.digest(model.parameters())
        result.states = self.place.digest(states(optimizer))
        return result

    def peak(self) -> int:
        """Return the bytes that two steps need at once, with optimizer states."""
        return self.place.peak(lambda: self.run(2))
