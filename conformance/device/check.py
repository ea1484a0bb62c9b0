"""`scripts/device-check`: is the cache right on this device, and what does it cost there?

::

    scripts/device-check                        # on the first CUDA device, about two minutes
    scripts/device-check --device cpu-simulated # the same code without a device; its times mean nothing

Four parts, one table: every row bit for bit while forwards overwrite their buffers; the freeze and the copies, beside
what the device can do; the engine thread's time; how much of the copies hides behind the forward. Parts for which no
time is left (`--limit-s`) are skipped. The exit status says whether the rows were right.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from conformance.bench.feed import Admission, Batch, Feed, Step
from conformance.device.backends import BACKENDS, Backend
from omni_prefix_fast import (
    HIDDEN_KEY,
    FullAttentionGroupView,
    ModelCachePolicy,
    OmniPrefixCacheManager,
    PrefixCacheConfig,
    StageCacheOutputs,
)

BLOCK = 16
CODES = "codes"
"""The deferred key, int64."""
CODE_WIDTH = 16
POLICY = ModelCachePolicy(token_keys=frozenset(), deferred_keys=frozenset({CODES}))
WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is done."""

    width: int
    documents: int
    """Prompts that are prefilled and hit in each round."""
    tokens: int
    """Tokens of a prompt."""
    rounds: int
    """Rounds of the check for right rows; each takes over the blocks of the one before."""
    batches: tuple[int, ...]
    steps: int
    """Steps that are timed."""
    step_rows: int
    """Rows of a step whose copy is compared with the forward."""
    limit_bytes: int
    """Bytes of the plain copy that bandwidth is compared with."""
    matrix: int
    """Side of the matrices that stand for a forward."""
    products: int
    """Matrix products of one forward."""


FULL = Sizes(2048, 8, 512, 6, (1, 8, 64, 256), 200, 2048, 1 << 28, 4096, 16)
QUICK = Sizes(64, 3, 48, 3, (1, 8), 20, 64, 1 << 20, 64, 2)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table."""

    part: str
    what: str
    value: str
    beside: str = ""
    right: bool | None = None
    """Whether it is as it has to be; None: a figure, not a claim."""


class Rows:
    """What the model computes for a token: integers that bf16 holds exactly, the same on host and device."""

    def __init__(self, sizes: Sizes, device: torch.device, capacity: int) -> None:
        self.columns = {"cpu": torch.arange(sizes.width), device.type: torch.arange(sizes.width, device=device)}
        self.codes = {"cpu": torch.arange(CODE_WIDTH), device.type: torch.arange(CODE_WIDTH, device=device)}
        self.hidden_buffer = torch.empty((capacity, sizes.width), dtype=torch.bfloat16, device=device)
        self.codes_buffer = torch.empty((capacity, CODE_WIDTH), dtype=torch.int64, device=device)

    def hidden(self, bases: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows of tokens, where `bases` is."""
        seeds = bases * 31 + positions * 7
        return ((seeds[:, None] + self.columns[bases.device.type] * 3) % 251).to(torch.bfloat16)

    def code(self, bases: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows of the deferred key."""
        return (bases * 1_000_003 + positions)[:, None] * CODE_WIDTH + self.codes[bases.device.type]

    def forward(self, bases: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a step into the buffers that every step uses, as a captured graph does."""
        count = positions.shape[0]
        self.hidden_buffer[:count].copy_(self.hidden(bases, positions))
        self.codes_buffer[:count].copy_(self.code(bases, positions))
        return self.hidden_buffer[:count], self.codes_buffer[:count]

    def overwrite(self) -> None:
        """The next forward begins."""
        self.hidden_buffer.fill_(-1)
        self.codes_buffer.fill_(-1)

    def wrong(self, outs: StageCacheOutputs, req_id: str, base: int) -> tuple[int, int]:
        """Rows of a request that were compared, and how many differ."""
        start, end = outs.spans[req_id]
        positions = torch.arange(start, end)
        bases = torch.full_like(positions, base)
        assert outs.hidden_states is not None
        pairs = (
            (outs.hidden_states[req_id], self.hidden(bases, positions)),
            (outs.mm_outputs[CODES][req_id], self.code(bases, positions)),
        )
        return 2 * len(positions), sum(int((got != right).any(dim=1).sum()) for got, right in pairs)


class Rig(Feed):
    """An asynchronous cache with every page and pool in place, and the steps that are fed to it."""

    def __init__(self, backend: Backend, sizes: Sizes, *, requests: int, blocks: int, capacity: int) -> None:
        batch = Batch(requests, blocks)
        config = PrefixCacheConfig(
            num_blocks=requests * blocks + 1, block_size=BLOCK, staging_depth=8, staging_capacity_tokens=capacity
        )
        view = FullAttentionGroupView(batch, BLOCK)
        self.manager = OmniPrefixCacheManager(config, view, eager=False, device=backend.make_device())
        self.manager.register_policy(POLICY)
        self.manager.warm_up({HIDDEN_KEY: (torch.bfloat16, (sizes.width,)), CODES: (torch.int64, (CODE_WIDTH,))})
        super().__init__(batch, self.manager)


class Forward:
    """Matrix products that keep the device busy for some milliseconds."""

    def __init__(self, backend: Backend, sizes: Sizes) -> None:
        shape = (sizes.matrix, sizes.matrix)
        self._a = torch.rand(shape, device=backend.torch_device).to(torch.bfloat16)
        self._b = torch.empty_like(self._a)
        self._products = sizes.products

    def __call__(self) -> None:
        for _ in range(self._products):
            torch.matmul(self._a, self._a, out=self._b)


# ---------------------------------------------------------------------------------------------------- right rows


class RowsCheck:
    """Steps whose rows are known, handed over a step late on a builder thread, and compared there."""

    def __init__(self, backend: Backend, sizes: Sizes, rig: Rig, builder: ThreadPoolExecutor) -> None:
        self._torch_device = backend.torch_device
        self._rig, self._builder = rig, builder
        self._rows = Rows(sizes, backend.torch_device, 2 * sizes.tokens)
        self._forward = Forward(backend, sizes)
        self.bases: dict[str, int] = {}
        self.handed: list[Future[tuple[int, int]]] = []

    def step(self, step: Step) -> None:
        """Compute and save a step; then the next forward begins to overwrite its buffers."""
        batch = self._rig.batch
        counts = {**step.running, **{new.req_id: new.count for new in step.new}}
        at = {r: int(batch.num_computed_tokens_cpu[batch.req_id_to_index[r]]) for r in step.running}
        at |= {new.req_id: new.computed for new in step.new}
        order = [r for r in (*batch.req_ids, *(new.req_id for new in step.new)) if r in counts]
        bases = torch.tensor([self.bases[r] for r in order for _ in range(counts[r])])
        positions = torch.tensor([p for r in order for p in range(at[r], at[r] + counts[r])])
        self._forward()
        hidden, codes = self._rows.forward(bases.to(self._torch_device), positions.to(self._torch_device))
        step_id, _ = self._rig.save(step, hidden, {CODES: codes})
        self._rows.overwrite()
        self.handed.append(self._builder.submit(self._compare, step_id, order))
        if len(self.handed) > 2:
            self.handed[-3].result(WAIT_S)

    def _compare(self, step_id: int, req_ids: Sequence[str]) -> tuple[int, int]:
        outs = self._rig.manager.materialize(step_id, req_ids)
        found = [self._rows.wrong(outs, r, self.bases[r]) for r in req_ids]
        return sum(n for n, _ in found), sum(wrong for _, wrong in found)


def check_rows(backend: Backend, sizes: Sizes) -> Iterator[Line]:
    """Prefills, decodes, hits and recycled blocks: every row that is handed over, bit for bit."""
    blocks = -(-(sizes.tokens + 2 * BLOCK) // BLOCK)
    hit = sizes.tokens // BLOCK - 1
    rig = Rig(backend, sizes, requests=2 * sizes.documents, blocks=blocks, capacity=2 * sizes.tokens)
    with ThreadPoolExecutor(1, thread_name_prefix="builder") as builder:
        check = RowsCheck(backend, sizes, rig, builder)
        gone: list[str] = []
        for at in range(sizes.rounds):
            documents = [f"document {at}.{i}" for i in range(sizes.documents)]
            readers = [f"reader {at}.{i}" for i in range(sizes.documents)]
            for i, name in enumerate(documents):
                check.bases[name] = check.bases[readers[i]] = at * sizes.documents + i + 1
                whole = range(1 + 2 * i * blocks, 1 + (2 * i + 1) * blocks)
                check.step(Step([Admission(name, whole, 0, sizes.tokens)], dict.fromkeys(documents[:i], 1), gone))
                gone = []
            for i, name in enumerate(readers):
                own = range(1 + (2 * i + 1) * blocks, 1 + (2 * i + 2) * blocks - hit)
                table = [*range(1 + 2 * i * blocks, 1 + 2 * i * blocks + hit), *own]
                check.step(Step([Admission(name, table, hit * BLOCK, BLOCK)], {documents[i]: 1}, gone))
                gone = [documents[i]]
            gone += readers
        rig.manager.drain(WAIT_S)
        found = [future.result(WAIT_S) for future in check.handed]
    statistics = rig.manager.statistics()
    rig.manager.shutdown()
    compared, wrong = sum(n for n, _ in found), sum(w for _, w in found)
    hits = sum(statistics.rows_hit.values())
    yield Line("rows", "compared, bit for bit", f"{compared:,}", f"{len(found)} steps, handed over late", compared > 0)
    yield Line("rows", "wrong", f"{wrong:,}", "buffers overwritten right after each save", wrong == 0)
    yield Line(
        "rows", "from the cache", f"{hits:,}", f"{statistics.reads_preserved} hits gathered for a claim", hits > 0
    )
    deferred = statistics.writes_deferred
    yield Line("rows", "deferred writes", f"{deferred:,}", "flushed when their request ended", deferred > 0)


# ---------------------------------------------------------------------------------------------------- copies


def check_copies(backend: Backend, sizes: Sizes) -> Iterator[Line]:
    """The freeze and the copy of a step, beside plain copies of many bytes."""
    device = backend.make_device()
    repeats = 20 if backend.real else 3
    limit = backend.host(sizes.limit_bytes // (2 * sizes.width), sizes.width)
    source = torch.zeros_like(limit, device=backend.torch_device)
    on_device = torch.empty_like(source)
    to_host = _rate(limit, backend.time(lambda: limit.copy_(source, non_blocking=True), repeats))
    within = _rate(limit, backend.time(lambda: on_device.copy_(source), repeats))
    size = f"{sizes.limit_bytes >> 20} MiB at once"
    yield Line("copies", "limit: device to host", f"{to_host:,.1f} GB/s", size)
    yield Line("copies", "limit: within the device", f"{within:,.1f} GB/s", size + ", bytes read")
    for count in (64, 256, sizes.step_rows, 8 * sizes.step_rows):
        rows = torch.zeros((count, sizes.width), dtype=torch.bfloat16, device=backend.torch_device)
        out = backend.host(count, sizes.width)
        name = f"{count} rows, {rows.numel() * 2 / 2**20:.2f} MiB"
        cloned = backend.time(lambda rows=rows: device.clone(rows, torch.bfloat16), repeats)  # type: ignore[misc]
        yield Line("copies", f"freeze {name}", _micro(cloned), f"{_rate(rows, cloned) / within:.0%} of the limit")
        landed = _timed(lambda rows=rows, out=out: device.launch([(rows, out)]).wait(), repeats)  # type: ignore[misc]
        rate = _rate(rows, landed)
        yield Line("copies", f"freeze and land {name}", _micro(landed), f"{rate:.1f} GB/s, {rate / to_host:.0%} of it")
        issued: list[float] = []
        for _ in range(repeats):
            began = perf_counter()
            transfer = device.launch([(rows, out)])
            issued.append(perf_counter() - began)
            transfer.wait()
        yield Line("copies", f"launch {name}", _micro(issued), "on the engine thread")
    log = device.clone(
        torch.zeros((sizes.step_rows, CODE_WIDTH), dtype=torch.int64, device=backend.torch_device), torch.int64
    )
    index = np.arange(0, sizes.step_rows, 2)
    found = torch.empty((len(index), CODE_WIDTH), dtype=torch.int64)
    picked = _timed(lambda: device.rows_to_host(log, index, found), repeats)
    yield Line("copies", f"gather {len(index)} deferred rows", _micro(picked), "a hit on rows still on the device")
    flushed = _timed(lambda: device.gather_to_host([log], 1 << 24), repeats)
    yield Line("copies", f"flush {sizes.step_rows} deferred rows", _micro(flushed), "when a request finishes")


# ---------------------------------------------------------------------------------------------------- engine thread


def check_engine_thread(backend: Backend, sizes: Sizes) -> Iterator[Line]:
    """Decode steps with the builder on a thread of its own: what start and save take of the engine's."""
    for batch in sizes.batches:
        steps = sizes.steps + 20
        blocks = -(-(steps + 1) // BLOCK)
        rig = Rig(backend, sizes, requests=batch, blocks=blocks, capacity=max(batch, 64))
        names = [f"r{i}" for i in range(batch)]
        hidden = torch.zeros((batch, sizes.width), dtype=torch.bfloat16, device=backend.torch_device)
        codes = torch.zeros((batch, CODE_WIDTH), dtype=torch.int64, device=backend.torch_device)
        new = [Admission(r, list(range(1 + i * blocks, 1 + (i + 1) * blocks)), 0, 1) for i, r in enumerate(names)]
        seconds: list[float] = []
        with _handing_over(rig, names) as hand_over:
            for at in range(steps):
                step = Step(running=dict.fromkeys(names, 1)) if at else Step(new=new)
                step_id, times = rig.save(step, hidden, {CODES: codes})
                hand_over(step_id)
                backend.sync()
                seconds.append(times.start + times.save)
        counted = sorted(seconds[20:])
        locked = rig.manager.lock_times()
        rig.manager.shutdown()
        slow = (
            f"p90 {counted[int(len(counted) * 0.9)] * 1e6:,.0f} us, state lock at most {locked.longest_s * 1e6:,.0f} us"
        )
        yield Line("engine thread", f"start and save, batch {batch}", _micro(counted), slow)


# ---------------------------------------------------------------------------------------------------- overlap


def check_overlap(backend: Backend, sizes: Sizes) -> Iterator[Line]:
    """Steps of many rows behind a forward of some milliseconds, with the cache and without."""
    forward, count = Forward(backend, sizes), sizes.step_rows
    blocks = -(-count // BLOCK)
    steps = min(sizes.steps, 50)
    hidden = torch.zeros((count, sizes.width), dtype=torch.bfloat16, device=backend.torch_device)
    codes = torch.zeros((count, CODE_WIDTH), dtype=torch.int64, device=backend.torch_device)
    device, out = backend.make_device(), backend.host(count, sizes.width)
    copy = median(_timed(lambda: device.launch([(hidden, out)]).wait(), 10))

    def run(rig: Rig | None) -> float:
        seconds: list[float] = []
        with _handing_over(rig, ["r"]) as hand_over:
            for at in range(steps + 5):
                table = range(1 + at % 2 * blocks, 1 + (at % 2 + 1) * blocks)
                step = Step([Admission(f"r{at}", table, 0, count)], finished=[f"r{at - 1}"] if at else [])
                began = perf_counter()
                forward()
                if rig is not None:
                    hand_over(rig.save(step, hidden, {CODES: codes})[0], [f"r{at}"])
                backend.sync()
                seconds.append(perf_counter() - began)
        return median(seconds[5:])

    off = run(None)
    rig = Rig(backend, sizes, requests=2, blocks=blocks, capacity=count)
    on = run(rig)
    rig.manager.shutdown()
    name = f"{count} rows a step"
    yield Line("overlap", f"step without the cache, {name}", _micro([off]), f"forward of {sizes.products} products")
    yield Line("overlap", "step with it", _micro([on]), f"{(on - off) / off:+.1%}")
    hidden_share = max(0.0, min(1.0, 1 - (on - off) / copy))
    yield Line(
        "overlap", "freeze and copy alone", _micro([copy]), f"{hidden_share:.0%} of it hidden behind the forward"
    )


@contextmanager
def _handing_over(rig: Rig | None, everybody: Sequence[str]) -> Iterator[Callable[..., None]]:
    """Hand each step over on a builder thread, and wait for those of two steps ago, as an engine would."""
    due: list[Future[object]] = []
    with ThreadPoolExecutor(1, thread_name_prefix="builder") as builder:

        def hand_over(step_id: int, req_ids: Sequence[str] = everybody) -> None:
            assert rig is not None
            due.append(builder.submit(rig.manager.materialize, step_id, req_ids))
            if len(due) > 2:
                due.pop(0).result(WAIT_S)

        yield hand_over
        for future in due:
            future.result(WAIT_S)


# ---------------------------------------------------------------------------------------------------- the command


def _timed(work: Callable[[], object], repeats: int) -> list[float]:
    """Seconds until each call came back."""
    seconds = []
    for _ in range(repeats + 2):
        began = perf_counter()
        work()
        seconds.append(perf_counter() - began)
    return seconds[2:]


def _rate(rows: torch.Tensor, seconds: list[float]) -> float:
    return rows.numel() * rows.element_size() / median(seconds) / 1e9


def _micro(seconds: list[float]) -> str:
    return f"{median(seconds) * 1e6:,.0f} us"


PARTS = {
    "rows": check_rows,
    "copies": check_copies,
    "engine thread": check_engine_thread,
    "overlap": check_overlap,
}


def run_parts(backend: Backend, sizes: Sizes, limit_s: float, parts: Sequence[str] = tuple(PARTS)) -> list[Line]:
    """Every part, or those that the time allows. A part that raises is a line that is wrong."""
    end = monotonic() + limit_s
    lines: list[Line] = []
    for part in parts:
        if monotonic() > end:
            lines.append(Line(part, "skipped", "", f"no time left of {limit_s:g} s (--limit-s)"))
            continue
        try:
            lines += PARTS[part](backend, sizes)
        except Exception as error:  # noqa: BLE001 - the other parts are worth having
            lines.append(Line(part, "failed", type(error).__name__, str(error), right=False))
    return lines


def table_of(backend: Backend, lines: Sequence[Line]) -> Table:
    """The table."""
    title = f"The cache on this device: {backend.name}" + ("" if backend.real else " (times mean nothing)")
    table = Table(title=title, title_justify="left")
    for name, justify in (("part", "left"), ("what", "left"), ("value", "right"), ("", "left"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    last = ""
    for line in lines:
        if last and line.part != last:
            table.add_section()
        verdict = {True: "[green]right[/]", False: "[red]WRONG[/]", None: ""}[line.right]
        table.add_row("" if line.part == last else line.part, line.what, line.value, line.beside, verdict)
        last = line.part
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/device-check", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=list(BACKENDS), default="cuda")
    parser.add_argument("--limit-s", type=float, default=240.0, help="start no part after so many seconds")
    parser.add_argument("--quick", action="store_true", help="small sizes; always so on the simulated device")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="only this part; may be repeated")
    parser.add_argument("--json", type=Path, help="write the lines to a file as well")
    chosen = parser.parse_args(arguments)
    try:
        backend = BACKENDS[chosen.device]()
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    began = monotonic()
    sizes = QUICK if chosen.quick or not backend.real else FULL
    lines = run_parts(backend, sizes, chosen.limit_s, chosen.part or tuple(PARTS))
    console = Console() if sys.stdout.isatty() else Console(width=130)
    console.print(table_of(backend, lines))
    console.print(f"{monotonic() - began:.0f} s, torch {torch.__version__}")
    if chosen.json is not None:
        named = {"device": backend.name, "torch": torch.__version__, "sizes": asdict(sizes)}
        chosen.json.write_text(json.dumps({**named, "lines": [asdict(line) for line in lines]}, indent=1) + "\n")
    return 0 if all(line.right is not False for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
