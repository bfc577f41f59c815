"""Plans: what to move in a step, and when. The planner itself is ``csrc/pager/plan.c``."""

import enum
import re
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchpager import _core
from torchpager.roofline import Link
from torchpager.trace import Step, StepRecipe

# Operators that go over each operand once: lists and fused lists of optimizers, elementwise in
# place. One of their operands in HOST costs what a copy of it does.
_STREAMING = re.compile(
    r"::(_foreach_\w+|_fused_\w+|(add|sub|mul|div|addcmul|addcdiv|lerp|sqrt|copy|zero|fill)_)(\.|$)"
)
_NEVER = (1 << 32) - 1
_READS, _WRITES = 1, 2


class ActKind(enum.IntEnum):
    """What an act does with an extent or, from DROP on, with a block.

    RERUN runs the block's recipe. KEEP comes before the operator that the block dies after: its
    bytes stay, until DISCARD; so do those of a dead block that a rerun made.
    """

    WRITE_BACK = 0
    EVICT = 1
    FILL = 2
    LEAVE = 3
    DROP = 4
    RERUN = 5
    KEEP = 6
    DISCARD = 7


class Act(NamedTuple):
    """One act of a plan.

    It comes after the operator before ``operator`` has started, and before ``operator`` starts.
    A rerun counts as an operator: what comes behind it, comes after it has started.
    """

    operator: int
    block: int
    extent: int
    kind: ActKind


@dataclass(frozen=True, eq=False)
class Plan:
    """A plan of one step, and what the planner's model says of it.

    Attributes
    ----------
    acts
        In order.
    step_ms, in_bytes, out_bytes, peak_bytes
        Of one step in the steady state.
    reruns, rerun_ms, dropped_bytes
        What is made again in a step, and what that takes.
    """

    acts: tuple[Act, ...]
    step_ms: float
    in_bytes: int
    out_bytes: int
    peak_bytes: int
    reruns: int = 0
    rerun_ms: float = 0.0
    dropped_bytes: int = 0


def make_plan(
    step: Step,
    budget_bytes: int,
    *,
    recipes: Sequence[StepRecipe] = (),
    keep: bool = True,
    link: Link | None = None,
) -> Plan:
    """Plan a step inside a budget.

    Parameters
    ----------
    recipes
        Of blocks that may be dropped and made again, where that is faster than moving them.
    keep
        Whether the bytes of a block that has died may be kept for a rerun. The pager cannot:
        what the program has freed it makes again.

    Raises
    ------
    torchpager._core.CoreError
        The operands of an operator do not fit, and it does not stream.

    Examples
    --------
    >>> from torchpager.trace import StepBlock, StepOperator
    >>> weights = StepBlock(64 << 20, None, None)
    >>> multiply = [StepOperator("aten::mm", "", 5_000_000, (each,), ()) for each in range(3)]
    >>> plan = make_plan(Step(tuple(multiply), (weights,) * 3), 128 << 20)
    >>> plan.step_ms, plan.out_bytes
    (15.0, 0)
    """
    link = link or Link()
    acts, step_ns, in_bytes, out_bytes, peak_bytes, reruns, rerun_ns, dropped = _core.make_plan(
        **columns(step),
        **_recipe_columns(recipes),
        budget_bytes=budget_bytes,
        link_bytes_per_s=round(link.alone),
        link_both_bytes_per_s=round(link.both),
        no_keep=not keep,
    )
    return Plan(
        tuple(
            Act(operator, block, extent, ActKind(kind))
            for operator, block, extent, kind in struct.iter_unpack("=4I", acts)
        ),
        step_ns / 1e6,
        in_bytes,
        out_bytes,
        peak_bytes,
        reruns,
        rerun_ns / 1e6,
        dropped,
    )


def columns(step: Step) -> dict[str, bytes]:
    """Return a step in the form in which the core takes it (``_core.make_plan``), in order."""
    operand_end, blocks, flags = array("I"), array("I"), array("B")
    for at, operator in enumerate(step.operators):
        reads, writes = set(operator.reads), set(operator.writes)
        for block in dict.fromkeys((*operator.reads, *operator.writes)):
            # What is changed in place is listed as written only.
            is_read = block in reads or step.blocks[block].born != at
            blocks.append(block)
            flags.append(_READS * is_read | _WRITES * (block in writes))
        operand_end.append(len(blocks))
    return {
        "device_ns": array("Q", (each.device_ns for each in step.operators)).tobytes(),
        "operand_end": operand_end.tobytes(),
        "streams": bytes(bool(_STREAMING.search(each.name)) for each in step.operators),
        "operand_block": blocks.tobytes(),
        "operand_flags": flags.tobytes(),
        "block_bytes": array("Q", (each.size_bytes for each in step.blocks)).tobytes(),
        "born": _points(each.born for each in step.blocks),
        "dead": _points(each.dead for each in step.blocks),
    }


def _recipe_columns(recipes: Sequence[StepRecipe]) -> dict[str, bytes]:
    blocks, input_end, output_end = array("I"), array("I"), array("I")
    recipes = sorted(recipes, key=lambda each: each.operator)
    for recipe in recipes:
        blocks.extend(recipe.inputs)
        input_end.append(len(blocks))
        blocks.extend(recipe.outputs)
        output_end.append(len(blocks))
    return {
        "recipe_ns": array("Q", (each.device_ns for each in recipes)).tobytes(),
        "recipe_op": array("I", (each.operator for each in recipes)).tobytes(),
        "recipe_input_end": input_end.tobytes(),
        "recipe_output_end": output_end.tobytes(),
        "recipe_block": blocks.tobytes(),
    }


def _points(points: Iterable[int | None]) -> bytes:
    return array("I", (_NEVER if each is None else each for each in points)).tobytes()
