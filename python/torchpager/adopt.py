"""Moving tensors that exist already into memory that can be paged."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import torch

from torchpager import _control, _targets
from torchpager.errors import UnavailableError
from torchpager.sizes import kind_of

Adoptable: TypeAlias = object


def adopt(*things: Adoptable) -> int:
    """Move the storages of tensors that were made earlier into torchpager's memory.

    In a notebook the model exists before the context. Its tensors are native: they count
    against the budget and cannot move, until they were adopted. The tensor objects, their views
    and ties, and their place in autograd stay what they are; their addresses do not. Nothing
    outside PyTorch may hold an address of theirs from before (a NumPy view, a DLPack consumer,
    a raw pointer): the memory there is given back.

    Parameters
    ----------
    things
        Modules (their parameters, buffers and gradients), optimizers (the tensors of their
        state), tensors (and their gradients), and mappings, lists, tuples and sets of these.
        What is on another device, or is too small to be paged, is passed over.

    Returns
    -------
    int
        Bytes moved. A storage that was ours already counts 0.

    Raises
    ------
    UnavailableError
        No budget(), auto_offload() or simulate() is active.
    RuntimeError
        The memory of a tensor given by itself is not PyTorch's own (made from NumPy, shared,
        mapped from a file). Inside modules, optimizers and containers such tensors are passed
        over, with a warning in the log.
    TypeError
        A thing is none of the above.
    torch.OutOfMemoryError
        There is no room for a copy of a storage. Those moved before it stay moved.

    Examples
    --------
    >>> import torch, torchpager
    >>> model = torch.nn.Linear(1024, 1024)
    >>> with torchpager.simulate("64 MiB"), torchpager.auto_offload():
    ...     torchpager.adopt(model)
    4194304
    """
    tensors = list(tensors_in(things))
    asked_for = {id(thing) for thing in things}
    moved = 0
    done: set[int] = set()
    with _control.lock:
        if not _targets.any_door():
            raise UnavailableError(
                "adopt() moves tensors into an active context: enter torchpager.budget() or "
                "torchpager.auto_offload() first"
            )
        for tensor in tensors:
            move, storage = _targets.mover(tensor.device), _storage_id(tensor)
            if move is None or storage is None or storage in done:
                continue
            done.add(storage)
            try:
                moved += move(tensor)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                if id(tensor) in asked_for:
                    raise
                _control.logger.warning(
                    "a tensor of shape %s stays native: %s", tuple(tensor.shape), error
                )
    return moved


def tensors_in(things: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yield the tensors of modules, optimizers, tensors and containers of these.

    Raises
    ------
    TypeError
        A thing at the top, or in a container, is none of these.
    """
    for thing in things:
        if isinstance(thing, torch.Tensor):
            yield thing
            if thing.is_leaf and thing.grad is not None:
                yield thing.grad
        elif isinstance(thing, torch.nn.Module):
            yield from tensors_in(thing.parameters())
            yield from thing.buffers()
        elif isinstance(thing, torch.optim.Optimizer):
            for state in thing.state.values():
                yield from _nested(state)
        elif isinstance(thing, Mapping):
            yield from tensors_in(thing.values())
        elif isinstance(thing, list | tuple | set | frozenset):
            yield from tensors_in(thing)
        else:
            raise TypeError(
                f"{kind_of(thing)} holds no tensors that torchpager knows of; possible "
                "are modules, optimizers, tensors, and containers of them"
            )


def _nested(state: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of an optimizer's state, which holds numbers and lists as well."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from _nested(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from _nested(value)


def _storage_id(tensor: torch.Tensor) -> int | None:
    """Return what tells storages apart; None for a tensor without one."""
    if tensor.layout is not torch.strided or not _control.tensor_address(tensor):
        return None
    storage_id: int = tensor.untyped_storage()._cdata
    return storage_id
