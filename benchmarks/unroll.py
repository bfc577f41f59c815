"""Carry out the drops and reruns of a plan on paper, and check them.

What comes out is a step in which each rerun is an operator and each life of a block is a block,
with a plan that only moves bytes: the machine of ``replay.py`` runs it and checks that it stays
inside the budget and that operands are there.

Here it is checked that no operator and no rerun finds an operand dropped, discarded or dead,
and that each finds in it what it would find if nothing were ever dropped. The contents of a
block are what wrote it last; a rerun makes the contents that its operator made, if all its
inputs hold what they held when that operator ran. Shares no code with the planner.
"""

from dataclasses import dataclass, replace

from torchpager.plan import Act, ActKind, Plan
from torchpager.trace import Step, StepBlock, StepOperator, StepRecipe

_OF_BLOCKS = frozenset((ActKind.DROP, ActKind.RERUN, ActKind.KEEP, ActKind.DISCARD))


class WrongPlanError(Exception):
    """A plan that would run an operator on something else than its operands."""


@dataclass
class _Life:
    """A stretch in which a block has its bytes: born before an operator, dead after one."""

    block: int
    born: int | None = None
    dead: int | None = None


class Unroller:
    """Walks a plan through its step."""

    def __init__(self, step: Step, plan: Plan, recipes: tuple[StepRecipe, ...]) -> None:
        self.step = step
        self.plan = plan
        self.made_by = {block: each for each in recipes for block in each.outputs}
        self.recipe_at = {each.operator: each for each in recipes}
        self.operators: list[StepOperator] = []
        self.acts: list[Act] = []
        self.reruns = 0
        # What each block holds in the plan, and would hold without it.
        self.contents: dict[int, object] = {}
        self.expected: dict[int, object] = {}
        self.found: dict[int, dict[int, object]] = {}  # by recipe: in its inputs, back then
        self.made: dict[int, dict[int, object]] = {}
        self.kept: set[int] = set()
        self.gone: set[int] = set()  # dead, as the program sees it
        self.dying: dict[int, int] = {}  # lives that end with the operator started last
        self.early: list[int] = []  # acts before the first operator on what is not there then
        # The first life of each block has its number.
        self.lives = [_Life(at) for at in range(len(step.blocks))]
        self.life: dict[int, int] = {}  # of each block whose bytes are there
        for at, block in enumerate(step.blocks):
            if block.born is None or (block.dead is not None and block.dead < block.born):
                self.life[at] = at
                self.contents[at] = self.expected[at] = ("before", at)

    def run(self) -> tuple[Step, Plan]:
        """Return the step with reruns, and the moves in it."""
        begin = [0] * (len(self.step.operators) + 1)
        for act in self.plan.acts:
            begin[act.operator + 1] += 1
        for at in range(len(self.step.operators)):
            begin[at + 1] += begin[at]
        born: dict[int, list[int]] = {}
        dead: dict[int, list[int]] = {}
        for at, block in enumerate(self.step.blocks):
            if block.born is not None and block.dead is not None:
                born.setdefault(block.born, []).append(at)
                dead.setdefault(block.dead, []).append(at)
        for at, operator in enumerate(self.step.operators):
            for act in self.plan.acts[begin[at] : begin[at + 1]]:
                self._act(at, act)
            self._operator(at, operator, born.get(at, []), dead.get(at, []))
        self._finish()
        blocks = tuple(
            StepBlock(self.step.blocks[each.block].size_bytes, each.born, each.dead)
            for each in self.lives
        )
        return Step(tuple(self.operators), blocks), replace(self.plan, acts=tuple(self.acts))

    # -- acts ----------------------------------------------------------------------------------

    def _check(self, holds: bool, at: int, what: str) -> None:
        if not holds:
            raise WrongPlanError(f"before operator {at}: {what}")

    def _act(self, at: int, act: Act) -> None:
        block = act.block
        if act.kind not in _OF_BLOCKS:
            life = self.life.get(block, self.dying.get(block))
            if life is None and at == 0:
                # Perhaps of a life that ends with the step: it is known where it does.
                self.early.append(len(self.acts))
                life = block
            if life is None:
                raise WrongPlanError(
                    f"before operator {at}: {act.kind.name} of block {block}, not there"
                )
            self.acts.append(Act(len(self.operators), life, act.extent, act.kind))
        elif act.kind is ActKind.DROP:
            self._check(block in self.life, at, f"block {block} is dropped, not there")
            self._check(block in self.made_by, at, f"block {block} is dropped without a recipe")
            self._end(block)
        elif act.kind is ActKind.DISCARD:
            there = block in self.life and block in self.gone
            self._check(there, at, f"block {block} is discarded, not a dead one with bytes")
            self._end(block)
        elif act.kind is ActKind.KEEP:
            dies = self.step.blocks[block].dead == at and block in self.life
            self._check(dies, at, f"block {block} is kept and does not die")
            self.kept.add(block)
        else:
            self._rerun(at, block)

    def _end(self, block: int) -> None:
        """Let the bytes go behind what was started last."""
        self.lives[self.life.pop(block)].dead = len(self.operators) - 1
        self.contents.pop(block)

    def _rerun(self, at: int, block: int) -> None:
        recipe = self.made_by.get(block)
        if recipe is None or recipe.operator not in self.found:
            raise WrongPlanError(f"before operator {at}: block {block} cannot be made again")
        self._check(block not in self.life, at, f"block {block} is made again, but is there")
        found = self.found[recipe.operator]
        for each in recipe.inputs:
            self._check(each in self.life, at, f"a rerun reads block {each}, not there")
            self._check(
                self.contents[each] == found[each], at, f"a rerun reads block {each}, written"
            )
        place = len(self.operators)
        self.dying = {}
        reads = tuple(self.life[each] for each in recipe.inputs)
        writes = []
        for each in recipe.outputs:
            writes.append(len(self.lives))
            comes = each == block or (each not in self.life and each not in self.gone)
            if comes:
                self.life[each] = len(self.lives)
                self.contents[each] = self.made[recipe.operator][each]
            # What is not wanted takes memory only while the operator runs.
            self.lives.append(_Life(each, place, None if comes else place))
        name = self.step.operators[recipe.operator].name
        self.operators.append(
            StepOperator(name, "rerun", recipe.device_ns, reads, tuple(writes))
        )
        self.reruns += 1

    # -- operators -----------------------------------------------------------------------------

    def _operator(
        self, at: int, operator: StepOperator, born: list[int], dead: list[int]
    ) -> None:
        place = len(self.operators)
        self.dying = {}
        for block in born:
            self.lives[block].born = place
            self.life[block] = block
            self.contents[block] = self.expected[block] = ("born", block)
        for block in dict.fromkeys((*operator.reads, *operator.writes)):
            self._check(block in self.life, at, f"its operand {block} is not there")
            same = self.contents[block] == self.expected[block]
            self._check(same, at, f"its operand {block} holds something else")
        recipe = self.recipe_at.get(at)
        if recipe is not None:
            # Those of the inputs that its operator has made itself are none.
            self.found[at] = {each: self.expected[each] for each in recipe.inputs}
        for block in operator.writes:
            self.contents[block] = self.expected[block] = (at, block)
        if recipe is not None:
            self.made[at] = {each: self.expected[each] for each in recipe.outputs}
        self.operators.append(
            replace(
                operator,
                reads=tuple(self.life[each] for each in operator.reads),
                writes=tuple(self.life[each] for each in operator.writes),
            )
        )
        for block in dead:
            self.gone.add(block)
            if block in self.kept:
                self.kept.discard(block)
            elif block in self.life:
                self.dying[block] = self.life.pop(block)
                self.lives[self.dying[block]].dead = place

    def _finish(self) -> None:
        end = len(self.step.operators)
        for at in self.early:
            act = self.acts[at]
            self._check(act.block in self.dying, 0, f"{act} of a block that is not there")
            self.acts[at] = act._replace(block=self.dying[act.block])
        for block, life in self.life.items():
            its = self.step.blocks[block]
            across = its.dead is not None and its.born is not None and its.dead < its.born
            lasts = its.born is None or across
            self._check(lasts and life == block, end, f"block {block} is still there")


def unroll(step: Step, plan: Plan, recipes: tuple[StepRecipe, ...]) -> tuple[Step, Plan]:
    """Return the step with the plan's reruns in it, and a plan of its moves.

    Raises
    ------
    WrongPlanError
        Some operator or rerun would not find its operands, or not what they held.
    """
    return Unroller(step, plan, recipes).run()
