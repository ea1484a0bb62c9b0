"""The worked example of the design: 8 blocks of 4 tokens, hidden size 2, one multimodal tensor of width 16.

Two requests that share their first four words go through the cache's public calls. What the second is handed over is
the cached rows of block 0 and the rows of its own forward, and equals what a forward over the whole prompt gives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from rich.console import Console
from rich.table import Table

from conformance.engine.runner import RunnerBatch
from conformance.engine.scheduler import CachedRequests, NewRequest, SchedulerOutput
from omni_prefix_fast import ModelCachePolicy, OmniPrefixCacheManager, PrefixCacheConfig, StageCacheOutputs

NUM_BLOCKS, BLOCK_SIZE, HIDDEN_SIZE, FEATURE_SIZE = 8, 4, 2, 16
MM_KEY = "mm_feature"
FIRST = ["The", "quick", "brown", "fox", "was", "tired", "and", "slept", "beneath", "the", "shady", "tree"]
SECOND = ["The", "quick", "brown", "fox", "jumped", "over", "the", "dog"]
CELL = 22


@dataclass(frozen=True, slots=True)
class Rows:
    """The outputs of a forward over some positions of a prompt."""

    hidden: torch.Tensor
    feature: torch.Tensor


def forward(words: Sequence[str], start: int = 0) -> Rows:
    """A forward over positions ``start`` to the end. A row depends on all words up to its own.

    Hidden: the word's length, and the letters so far. The feature: 16 numbers from a checksum of the words so far.
    """
    hidden, feature = [], []
    for position in range(start, len(words)):
        prefix = words[: position + 1]
        hidden.append([float(len(prefix[-1])), float(sum(map(len, prefix)))])
        digest = crc32(" ".join(prefix).encode())
        feature.append([float(crc32(bytes([lane]), digest) % 1000) for lane in range(FEATURE_SIZE)])
    return Rows(torch.tensor(hidden), torch.tensor(feature))


def run_example(console: Console) -> bool:
    """Print the example; return whether the second request got what it would have got without prefix caching."""
    say = _Printer(console)
    view = RunnerBatch(BLOCK_SIZE)
    cache = OmniPrefixCacheManager(
        PrefixCacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, staging_capacity_tokens=16), view, eager=True
    )
    cache.register_policy(ModelCachePolicy(token_keys=frozenset({MM_KEY})))
    try:
        say.title(f"{NUM_BLOCKS} blocks of {BLOCK_SIZE}, hidden size {HIDDEN_SIZE}, {MM_KEY} of width {FEATURE_SIZE}")
        say.line("The first request has 12 tokens, which fill three blocks:")
        say.blocks_of(FIRST, [0, 1, 2])
        _step(cache, view, NewRequest("first", list(range(12)), ([0, 1, 2],), 0), forward(FIRST))
        say.line("Its forward computes 12 rows a tensor. Each is kept in the slot of its token:")
        say.cache([FIRST[0:4], FIRST[4:8], FIRST[8:12]], {})
        say.line("Or, seen as one row a slot:")
        say.rows(FIRST, forward(FIRST))

        say.line("The second request begins with the same four words:")
        say.blocks_of(SECOND, [0, 3])
        say.line("The scheduler finds block 0 in its prefix cache: num_computed_tokens=4. The forward")
        say.line("computes the other 4 rows only, and they are kept in block 3:")
        new = forward(SECOND, start=4)
        outs = _step(cache, view, NewRequest("second", list(range(8)), ([0, 3],), 4), new)
        notes = {0: "already in the cache", 3: "added by the second request"}
        say.cache([FIRST[0:4], FIRST[4:8], FIRST[8:12], SECOND[4:8]], notes)
        return say.merged(outs, view.slots("second", 0, 8))
    finally:
        cache.shutdown()


def _step(cache: OmniPrefixCacheManager, view: RunnerBatch, request: NewRequest, rows: Rows) -> StageCacheOutputs:
    """One step of one request through the cache's public calls."""
    count = len(rows.hidden)
    sched = SchedulerOutput([request], CachedRequests(), {request.req_id: count}, count, set(), set())
    cache.new_step_starts(sched)
    view.update(sched)
    step_id = cache.save_outputs(
        rows.hidden, {MM_KEY: rows.feature}, num_tokens_unpadded=count, num_tokens_padded=count
    )
    return cache.materialize(step_id, [request.req_id])


def _bar(label: str, width: int) -> str:
    return f"|<{f' {label} '.center(width - 4, '-')}>|"


def _numbers(row: torch.Tensor) -> str:
    """A row, cut short if it is wide."""
    shown = [f"{value:.0f}" for value in row[:2].tolist()] + (["..."] if len(row) > 2 else [])
    return f"({', '.join(shown)})"


class _Printer:
    """Draws prompts, blocks and rows."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def title(self, text: str) -> None:
        self._console.rule(f"[bold]The worked example: {text}", align="left")

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def blocks_of(self, words: Sequence[str], blocks: Sequence[int]) -> None:
        """A prompt in its blocks, and how each of them is identified by all that precedes it."""
        cells = [" ".join(words[i : i + BLOCK_SIZE]).center(CELL) for i in range(0, len(words), BLOCK_SIZE)]
        self.line("")
        self.line(" " * 9 + " ".join(f"[{cell}]" for cell in cells))
        for i, block in enumerate(blocks):
            prefix = _bar("prefix", i * (CELL + 3) - 1) + " " if i else ""
            self.line(f"Block {block}: {prefix}{_bar('block tokens', CELL + 2)}")
        self.line("")

    def cache(self, blocks: Sequence[Sequence[str]], notes: dict[int, str]) -> None:
        """The cache as rows of blocks."""
        self.line("")
        for i in range(NUM_BLOCKS):
            cell = f"[{' '.join(blocks[i]).center(CELL)}]" if i < len(blocks) else "[EMPTY]"
            note = f" < {notes[i]}" if i in notes else ""
            if i in {len(blocks), NUM_BLOCKS - 1} or i < len(blocks):
                self.line(f"  {i}: {cell}{note}")
            elif i == len(blocks) + 1:
                self.line("  ...")
        self.line("")

    def rows(self, words: Sequence[str], rows: Rows) -> None:
        """The cache as rows of slots, for a prompt that starts at slot 0."""
        self.line("")
        for slot in (0, 1, 2, 3, len(words) - 1):
            if slot == len(words) - 1:
                self.line("  ...")
            self.line(f"  {slot:2}: {words[slot]:8} hidden {_numbers(rows.hidden[slot]):9} {MM_KEY} "
                      f"{_numbers(rows.feature[slot])}")  # fmt: skip
        self.line(f"  {len(words):2}: [EMPTY]")
        self.line("")

    def merged(self, outs: StageCacheOutputs, slots: Sequence[int]) -> bool:
        """What the second request is handed over, beside a forward over its whole prompt."""
        full = forward(SECOND)
        if outs.hidden_states is None:
            raise AssertionError("the policy asked for hidden states")
        hidden, feature = outs.hidden_states["second"], outs.mm_outputs[MM_KEY]["second"]
        table = Table(title=f"Handed over for the second request: positions {outs.spans['second']}",
                      title_justify="left")  # fmt: skip
        for name in ("pos", "slot", "word", "row from", "hidden", MM_KEY, "uncached run"):
            table.add_column(name, justify="right" if name in {"pos", "slot"} else "left")
        good = hidden.shape == full.hidden.shape and feature.shape == full.feature.shape
        for position in range(min(len(hidden), len(feature), len(SECOND))):
            same = torch.equal(hidden[position], full.hidden[position]) and torch.equal(
                feature[position], full.feature[position]
            )
            good = good and same
            table.add_row(
                str(position),
                str(slots[position]),
                SECOND[position],
                "the cache" if position < BLOCK_SIZE else "this step",
                _numbers(hidden[position]),
                _numbers(feature[position]),
                "equal" if same else "[bold red]DIFFERENT",
            )
        self._console.print(table)
        verdict = "[green]equal" if good else "[bold red]DIFFERENT"
        sizes = (BLOCK_SIZE, HIDDEN_SIZE), (len(SECOND) - BLOCK_SIZE, HIDDEN_SIZE), tuple(hidden.shape)
        self._console.print(
            f"cached prefix {sizes[0]} + this step {sizes[1]} = hidden {sizes[2]},\n{MM_KEY} {tuple(feature.shape)}; "
            f"against the run without prefix caching: {verdict}",
            highlight=False,
        )
        return good
