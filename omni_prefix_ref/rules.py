"""The assertions of the machine, one function a rule, named as in spec/README.md.

`Rules` watches a run: it is told each action with the states before and after it, remembers on its own what the
machine must not forget (which rows each tenancy of a slot was given, what each step saved), and raises
`RuleBroken` with the name of the rule. It trusts nothing that the machine itself counts: tenancies are counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from omni_prefix_ref.errors import OmniPrefixCacheUnmatchError, RuleBroken
from omni_prefix_ref.machine import Machine
from omni_prefix_ref.state import (
    FINAL,
    HIDDEN_KEY,
    LEGAL_MOVES,
    ZEROS,
    HitRead,
    Key,
    LogRow,
    Occupancy,
    Outputs,
    PageRow,
    PoolRow,
    ReadId,
    Row,
    Rows,
    Slot,
    StepId,
    TaskState,
)

Due: TypeAlias = Mapping[Key, tuple[Row | None, ...]]
"""By key, the row that each position of a read is due; None where the tenancy has none."""


def require(rule: str, holds: bool, detail: Callable[[], str] | str) -> None:
    """Raise `RuleBroken` unless the rule holds."""
    if not holds:
        raise RuleBroken(rule, detail if isinstance(detail, str) else detail())


class Rules:
    """Checks every rule at every action of one run."""

    def __init__(self) -> None:
        self.told: dict[Slot, list[dict[Key, Row]]] = {}
        """By slot, the rows of each tenancy so far, in order."""
        self.saved: dict[StepId, Rows] = {}
        """By step, the rows that it saved."""
        self.due: dict[ReadId, Due] = {}
        """By read, what its plan has to mean."""
        self.consumed: set[StepId] = set()
        self._speak_of: dict[Callable[[Machine], None], tuple[str, ...]] = {
            self.planned_read_names_rows: ("reads", "pins", "version", "log"),
            self.rows_are_right: ("occupancy", "pool", "reads", "log", "version", "tasks"),
            self.hit_is_whole_or_fatal: ("reads",),
            self.one_writer: ("tasks", "queue"),
            self.page_held_while_read: ("pages", "steps", "tasks"),
            self.budget_charged_once: ("charged", "reserved", "log"),
            self.abort_still_lands: ("occupancy", "version", "tasks", "steps", "pages"),
            self.failure_is_loud_and_sticky: ("tasks", "failure"),
        }
        """The rules about states, each with the variables that it speaks of: it is checked when one of them changed."""

    def __call__(self, action: str, args: tuple[Any, ...], before: Machine, after: Machine) -> None:
        """Check one action. An observer of the drivers."""
        remember = getattr(self, f"_on_{action}", None)
        if remember is not None:
            remember(args, before, after)
        was = vars(before)
        changed = {name for name, value in vars(after).items() if value is not was[name]}
        for rule, variables in self._speak_of.items():
            if not changed.isdisjoint(variables):
                rule(after)
        self.strict_chain(action, before, after)
        self.plan_once(action, before, after)
        self.versions_never_fall(before, after)

    # ------------------------------------------------------------------------- what must be remembered

    def _on_claim_page(self, args: tuple[Any, ...], before: Machine, _: Machine) -> None:
        step, rows = args
        held = any(("step", step) in page.holders for page in before.pages)
        require(
            "step_consumed_once",
            step not in before.steps and step not in self.consumed and not held,
            f"step id {step} is issued twice",
        )
        self.saved[step] = rows

    def _on_cancel_step(self, args: tuple[Any, ...], _: Machine, after: Machine) -> None:
        del self.saved[args[0]]
        require("budget_charged_once", after.reserved == 0, f"{after.reserved} reserved bytes are not given back")

    def _on_claim_slots(self, args: tuple[Any, ...], before: Machine, after: Machine) -> None:
        step, slots, emits = args
        for i, slot in enumerate(slots):
            self.told.setdefault(slot, []).append({key: self.saved[step][key][i] for key in emits})
        self.claim_all(slots, emits, before, after)

    def _on_plan_read(self, args: tuple[Any, ...], _: Machine, after: Machine) -> None:
        self.due[args[0]] = self._due_now(after.reads[args[0]])

    def _on_open_step(self, args: tuple[Any, ...], _: Machine, after: Machine) -> None:
        for read in after.steps[args[0]].reads.values():
            self.due[read] = self._due_now(after.reads[read])

    def _on_take_step(self, args: tuple[Any, ...], _: Machine, __: Machine) -> None:
        require("step_consumed_once", args[0] not in self.consumed, f"step {args[0]} is consumed twice")
        self.consumed.add(args[0])

    _on_discard_step = _on_take_step

    def _on_outputs(self, args: tuple[Any, ...], _: Machine, after: Machine) -> None:
        self.span_owed_until_emitted(after, *args)

    def _due_now(self, hit: HitRead) -> Due:
        tenancies = [self.told[slot][-1] if self.told.get(slot) else {} for slot in hit.slots]
        keys = {key for tenancy in tenancies for key in tenancy} | {HIDDEN_KEY}
        return {key: tuple(tenancy.get(key) for tenancy in tenancies) for key in keys}

    # ------------------------------------------------------------------------- the rules

    def rows_are_right(self, state: Machine) -> None:
        """A committed row is its tenancy's; a planned row, fetched now or ever, is the row due when it was planned.

        Once a write has failed, every public call raises and no plan is ever served.
        """
        for key, column in state.occupancy.items():
            for slot, occupancy in enumerate(column):
                if occupancy is Occupancy.COMMITTED:
                    due = self.told[slot][-1].get(key)
                    found = state.pool[key][slot]
                    require("rows_are_right", found == due, f"{key} slot {slot}: pool has {found}, due {due}")
        for read, hit in state.reads.items():
            if hit.plan is None or hit.failed or state.failure is not None:
                continue
            for key in state.settings.key_names:
                due_rows = self.due[read].get(key, (None,) * len(hit.slots))
                rows = hit.rows[key] if hit.rows is not None else self._would_fetch(state, hit, key, due_rows)
                require("rows_are_right", rows == due_rows, f"read {read}, {key}: has {rows}, due {due_rows}")

    @staticmethod
    def _would_fetch(state: Machine, hit: HitRead, key: Key, due: tuple[Row | None, ...]) -> tuple[Row | None, ...]:
        """The rows that a fetch would gather in this state. A row still on its way counts as the one it will be."""
        assert hit.plan is not None
        waits = any(w in state.tasks and state.tasks[w].state is not TaskState.WRITTEN for w in hit.writers)
        rows: list[Row | None] = []
        for i, source in enumerate(hit.plan[key]):
            match source:
                case PoolRow(slot, version):
                    arrived = not waits or state.occupancy[key][slot] is not Occupancy.IN_TRANSIT
                    mine = state.version[slot] == version
                    rows.append(state.pool[key][slot] if arrived or not mine else due[i])
                case LogRow(chunk, row):
                    rows.append(state.log[chunk].rows[key][row])
                case None:
                    rows.append(None)
        return tuple(rows)

    def hit_is_whole_or_fatal(self, state: Machine) -> None:
        """Once the step is open, a read lacks no hidden row, or is failed for good."""
        if HIDDEN_KEY not in state.settings.key_names:
            return
        for read, hit in state.reads.items():
            if hit.step is not None and hit.plan is not None:
                whole = None not in hit.plan[HIDDEN_KEY]
                require("hit_is_whole_or_fatal", whole != hit.failed, f"read {read}: whole={whole} failed={hit.failed}")

    def claim_all(self, slots: tuple[Slot, ...], emits: frozenset[Key], before: Machine, after: Machine) -> None:
        """A claim raises each slot's version by one and ends the former tenancy for every key; it touches no other."""
        for slot, version in enumerate(after.version):
            claimed = slot in slots
            require(
                "claim_all",
                version == before.version[slot] + claimed == len(self.told.get(slot, ())),
                f"slot {slot} goes from version {before.version[slot]} to {version}",
            )
            for key, column in after.occupancy.items():
                due = before.occupancy[key][slot]
                if claimed:
                    due = Occupancy.IN_TRANSIT if key in emits else Occupancy.ABSENT
                require("claim_all", column[slot] is due, f"slot {slot}, {key}: {column[slot].value}, due {due.value}")

    def versions_never_fall(self, before: Machine, after: Machine) -> None:
        """`claim_all`, seen from any action."""
        falls = [s for s, v in enumerate(after.version) if v < before.version[s]]
        require("claim_all", not falls, f"versions fall at slots {falls}")

    def planned_read_names_rows(self, state: Machine) -> None:
        """What an unfetched plan names is still there: the tenancy lasts and is pinned, the chunk is held."""
        pins = [0] * state.settings.num_slots
        for read, hit in state.reads.items():
            for slot in hit.pinned:
                pins[slot] += 1
            for chunk in hit.chunks:
                held = chunk in state.log and ("read", read) in state.log[chunk].holders
                require("planned_read_names_rows", held, f"read {read} does not hold chunk {chunk}")
            if hit.plan is not None and hit.rows is None and not hit.failed:
                for sources in hit.plan.values():
                    lost = [s for s in sources if isinstance(s, PoolRow) and state.version[s.slot] != s.version]
                    require("planned_read_names_rows", not lost, f"read {read} lost {lost}")
        require("planned_read_names_rows", tuple(pins) == state.pins, f"pins are {state.pins}, plans need {pins}")

    def plan_once(self, action: str, before: Machine, after: Machine) -> None:
        """After its step is open, a read's plan never changes; `plan_read` alone makes one."""
        for read, hit in after.reads.items():
            was = before.reads.get(read)
            if was is None or was.plan == hit.plan:
                continue
            allowed = action == "plan_read" or (action == "unplan_reads" and hit.plan is None)
            require("plan_once", was.step is None and allowed, f"read {read} is planned anew by {action}")

    def strict_chain(self, action: str, before: Machine, after: Machine) -> None:
        """A task moves along the chain, one state at a time; it is gone only after WRITTEN."""
        for task, was in before.tasks.items():
            now = after.tasks.get(task)
            if now is None:
                require("strict_chain", was.state is TaskState.WRITTEN, f"task {task} vanishes in {was.state.value}")
            elif now.state is not was.state:
                legal = now.state in LEGAL_MOVES[was.state]
                require("strict_chain", legal, f"task {task}: {was.state.value} -> {now.state.value} by {action}")

    def one_writer(self, state: Machine) -> None:
        """One task at a time is being copied and written, and tasks are claimed first in, first out."""
        busy = [t for t, task in state.tasks.items() if task.state in (TaskState.COPYING, TaskState.HOST_READY)]
        require("one_writer", len(busy) <= 1, f"tasks {busy} are written at once")
        queued = {t for t, task in state.tasks.items() if task.state is TaskState.QUEUED}
        require("one_writer", queued == set(state.queue), f"queue {state.queue}, queued tasks {queued}")

    def span_owed_until_emitted(self, state: Machine, step: StepId, outputs: Outputs) -> None:
        """Whatever row of a hit is there is handed over, whether or not the step emits its key."""
        context = state.steps[step]
        for req in context.taken or ():
            start, end = context.spans[req]
            item = next(item for item in context.batch if item.req == req)
            require("span_owed_until_emitted", end - start >= len(item.slots), f"span of {req} is {start}..{end}")
            read = context.reads.get(req)
            for key, due in self.due[read].items() if read is not None else ():
                if any(row is not None for row in due):
                    found = outputs.rows.get(key, {}).get(req, ())[: len(due)]
                    filled = tuple(ZEROS if row is None else row for row in due)
                    require("span_owed_until_emitted", found == filled, f"{key} of {req}: {found}, due {filled}")

    def page_held_while_read(self, state: Machine) -> None:
        """Whoever still reads a page holds it, alone among steps, and finds its own rows there."""
        for i, page in enumerate(state.pages):
            steps = [n for kind, n in page.holders if kind == "step"]
            require("page_held_while_read", len(steps) <= 1, f"page {i} is held by steps {steps}")
        for step, context in state.steps.items():
            page = state.pages[context.page]
            mine = ("step", step) in page.holders and page.rows == self.saved[step]
            require("page_held_while_read", mine, f"step {step} does not find its rows on page {context.page}")
        for number, task in state.tasks.items():
            if task.state in FINAL:
                continue
            for index in {e.source.page for e in task.entries if isinstance(e.source, PageRow)}:
                held = ("write", number) in state.pages[index].holders
                require("page_held_while_read", held, f"write {number} does not hold page {index}")

    def budget_charged_once(self, state: Machine) -> None:
        """What is charged is what chunks somebody holds take, and what is reserved; never below zero or above all."""
        due = state.reserved + sum(chunk.num_bytes for chunk in state.log.values())
        require("budget_charged_once", state.charged == due, f"charged {state.charged}, held {due}")
        within = 0 <= state.charged <= state.settings.budget_bytes
        require("budget_charged_once", within, f"charged {state.charged} of {state.settings.budget_bytes}")
        require("budget_charged_once", all(c.holders for c in state.log.values()), "a chunk has no holder")

    def abort_still_lands(self, state: Machine) -> None:
        """Each row in transit is some task's, which is on its way; a sealed task of a forgotten request is, too."""
        carried = {e[:3] for task in state.tasks.values() if task.state is not TaskState.FAILED for e in task.entries}
        for key, column in state.occupancy.items():
            for slot, occupancy in enumerate(column):
                if occupancy is Occupancy.IN_TRANSIT:
                    lands = (key, slot, state.version[slot]) in carried or self._being_claimed(state, slot)
                    require("abort_still_lands", lands, f"{key} slot {slot} is in transit, but no task carries it")

    @staticmethod
    def _being_claimed(state: Machine, slot: Slot) -> bool:
        """The slot's step is between its claim and its snapshot: its tasks are about to be made."""
        owner = state.owner[slot]
        return owner not in state.steps and any(("step", owner) in page.holders for page in state.pages)

    def failure_is_loud_and_sticky(self, state: Machine) -> None:
        """A failed task has its record, and while there is one every public entry raises."""
        failed = [t for t, task in state.tasks.items() if task.state is TaskState.FAILED]
        require(
            "failure_is_loud_and_sticky", not failed or state.failure is not None, f"tasks {failed} failed silently"
        )
        if state.failure is not None:
            try:
                state.check_usable()
            except OmniPrefixCacheUnmatchError:
                return
            raise RuleBroken("failure_is_loud_and_sticky", "a public entry does not raise after a failed write")

    def at_rest(self, state: Machine) -> None:
        """With every request finished and every step consumed, nothing is left but rows, versions and the failure."""
        tables = "log", "tasks", "queue", "open_write", "write_n", "reads", "steps", "charged", "reserved", "emitted"
        left = {name: getattr(state, name) for name in tables if getattr(state, name)}
        pages = [i for i, page in enumerate(state.pages) if page.holders]
        require("at_rest", not left and not pages and not any(state.pins), f"left behind: {left}, pages {pages}")
