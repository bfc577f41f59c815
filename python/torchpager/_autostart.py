"""Arming a process: this one, and those it starts."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchpager import _compat, _control
from torchpager.budget import budget
from torchpager.offload import auto_offload
from torchpager.simulate import Simulation, simulate

VARIABLE = "TORCHPAGER_AUTOSTART"
_SITE = Path(__file__).parent / "_site"
_FLAGS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True)
class Arming:
    """What ``torchpager run`` puts in force, as given on its command line."""

    simulate: str | None = None
    sim_options: dict[str, str] = field(default_factory=dict)
    budget: str | None = None
    host_budget: str | None = None
    offload: bool = True

    def simulation(self) -> Simulation | None:
        """Return the simulate() that was asked for.

        Raises
        ------
        ValueError
            An option has no such value.
        """
        if self.simulate is None:
            return None
        return simulate(self.simulate, **_sim_options(self.sim_options))

    def contexts(self, device: int | None = None) -> list[_control.Context]:
        """Return the contexts on a device, in the order of entering.

        Raises
        ------
        ValueError
            A size is none.
        """
        wanted: list[_control.Context] = []
        if self.budget is not None:
            wanted.append(budget(self.budget, host=self.host_budget, device=device))
        if self.offload:
            wanted.append(auto_offload(host=self.host_budget, device=device))
        return wanted


def arm(arming: Arming) -> None:
    """Put in force what was asked for, until the process ends.

    On a CUDA device that happens when the program initialises CUDA, not before: a process that
    only starts others must not take a context on the device, nor be unable to fork.
    """
    simulation = arming.simulation()
    if simulation is not None:
        _start_all([simulation, *arming.contexts()])
    else:
        torch.cuda._lazy_call(  # type: ignore[no-untyped-call]
            lambda: _start_all(arming.contexts(_local_device()))
        )


def arm_child() -> None:
    """Arm a process below ``torchpager run``; called when it has imported torch."""
    text = os.environ.get(VARIABLE)
    if text is None or _compat.is_command_line():
        return
    arm(Arming(**json.loads(text)))


def child_environment(arming: Arming) -> dict[str, str]:
    """Return the environment variables that arm child processes."""
    paths = [str(_SITE)]
    inherited = os.environ.get("PYTHONPATH")
    if inherited:
        paths += [path for path in inherited.split(os.pathsep) if path != str(_SITE)]
    return {"PYTHONPATH": os.pathsep.join(paths), VARIABLE: json.dumps(asdict(arming))}


def _start_all(contexts: Iterable[_control.Context]) -> None:
    undos: list[_control.Undo] = []
    try:
        for context in contexts:
            undos.append(partial(_stop_if_active, context))
            context.start()
    except BaseException:
        _control.back_out(undos)
        raise


def _stop_if_active(context: _control.Context) -> None:
    if context.active:
        context.stop()


def _local_device() -> int | None:
    """Return the device that a launcher such as torchrun meant for this process."""
    rank = os.environ.get("LOCAL_RANK", "")
    if rank.isdigit() and int(rank) < torch.cuda.device_count():
        return int(rank)
    return None


def _sim_options(texts: dict[str, str]) -> dict[str, Any]:
    """Return the arguments of simulate() for options given as text."""
    options: dict[str, Any] = {}
    for name, text in texts.items():
        if name in ("granularity", "large_min"):
            options[name] = text
        elif name in ("strict", "page_out_before_each_op"):
            if text.lower() not in _FLAGS:
                raise ValueError(
                    f"--sim-option {name} is {text!r}; possible are true and false"
                )
            options[name] = _FLAGS[text.lower()]
        elif name == "seed":
            try:
                options[name] = int(text)
            except ValueError:
                raise ValueError(f"--sim-option seed is {text!r}, not a number") from None
        else:
            raise ValueError(
                f"--sim-option {name} is unknown; possible are granularity, large_min, strict, "
                "page_out_before_each_op and seed"
            )
    return options
