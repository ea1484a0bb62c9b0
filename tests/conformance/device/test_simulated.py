"""The simulated device keeps a device's promises, and breaks each on demand."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from conformance.device import DeviceTotals, Fault, SimulatedDevice, SimulatedDeviceError
from conformance.device.simulated import POISON, poison
from conformance.interleave import SerialRuntime, Uniform

LIMIT_S = 20.0
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]


def rows(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One column, a row for each value."""
    return torch.tensor([[value] for value in values]).to(dtype)


def poisoned(tensor: torch.Tensor) -> bool:
    """Whether every byte is poison."""
    return bool((tensor.contiguous().view(-1).view(torch.uint8) == POISON).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_live_at_the_launch_lands(dtype: torch.dtype) -> None:
    """Buffers overwritten right after the launch make no difference; until it lands, the destination is poison."""
    device = SimulatedDevice(directed=True)
    live, out = rows(0, 1, 1, 0, 1, dtype=dtype), torch.empty(5, 1, dtype=dtype)
    before = live.clone()
    transfer = device.launch([(live, out)])
    live.view(torch.uint8).fill_(0x55)
    assert poisoned(out)
    assert not transfer.landed()
    device.land_all()
    assert transfer.landed()
    transfer.wait()
    assert torch.equal(out.view(torch.uint8), before.view(torch.uint8))


def test_poison_is_no_row_of_any_test() -> None:
    """It is never 0 or -1, and reads as a large number."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32):
        tensor = torch.zeros(1, dtype=dtype)
        poison(tensor)
        assert float(tensor) > 10_000


@pytest.mark.parametrize("newest", [True, False])
def test_pieces_land_one_by_one_as_directed(newest: bool) -> None:
    """Each call lands one piece; the transfer is over with the last one."""
    device = SimulatedDevice(3, directed=True)
    out = torch.empty(64, 1)
    transfer = device.launch([(torch.arange(64.0)[:, None], out), (rows(7), torch.empty(1, 1))])
    pieces = device.pending
    assert pieces >= 2
    for left in range(pieces - 1, -1, -1):
        assert not transfer.landed()
        assert device.land_next(newest=newest)
        assert device.pending == left
    assert transfer.landed()
    assert not device.land_next()
    assert torch.equal(out[:, 0], torch.arange(64.0))


def test_by_itself_it_lands_at_different_moments() -> None:
    """Over the seeds, a copy has landed at once, somewhat later, or only as it is waited for; the seed decides."""

    def moment(seed: int) -> int:
        device = SimulatedDevice(seed)
        transfer = device.launch([(rows(1, 2, 3), torch.empty(3, 1))])
        for at in range(6):
            if transfer.landed():
                return at
        transfer.wait()
        assert transfer.landed()
        return 6

    moments = [moment(seed) for seed in range(60)]
    assert set(moments) == set(range(7))
    assert moments == [moment(seed) for seed in range(60)]


def test_widening_happens_at_the_launch() -> None:
    """The frozen rows have the destination's type, as on a real device."""
    device = SimulatedDevice(directed=True)
    out = torch.empty(2, 1, dtype=torch.float64)
    transfer = device.launch([(rows(1.5, 2.5, dtype=torch.float16), out)])
    assert device.live_bytes == 16
    device.land_all()
    transfer.wait()
    assert out[:, 0].tolist() == [1.5, 2.5]


def test_nothing_to_copy_has_landed() -> None:
    """A launch of no copies, or of copies of no bytes, is over."""
    device = SimulatedDevice(directed=True)
    assert device.launch([]).landed()
    transfer = device.launch([(torch.zeros(2, 0), torch.zeros(2, 0))])
    device.land_all()
    assert transfer.landed()


def test_released_memory_is_poisoned() -> None:
    """A clone lives as long as any view of it does, and its memory is poison from then on."""
    device = SimulatedDevice()
    clone = device.clone(rows(1, 2, 3), torch.float32)
    view = clone[1:]
    del clone
    assert device.live_bytes == 12
    assert view[:, 0].tolist() == [2, 3]
    bytes_ = view.untyped_storage()
    assert bytes_.nbytes() == 12
    del view, bytes_
    gc.collect()
    assert device.live_bytes == 0


def test_frozen_rows_live_until_the_wait() -> None:
    """And not longer, whoever keeps the transfer."""
    device = SimulatedDevice(directed=True)
    transfer = device.launch([(rows(1, 2), torch.empty(2, 1))])
    assert device.live_bytes == 8
    device.land_all()
    assert device.live_bytes == 8
    transfer.wait()
    assert device.live_bytes == 0


def test_a_transfer_dropped_too_early_lands_poison() -> None:
    """A copy under way keeps nothing alive: its source was given back, and something else stands there by now."""
    device = SimulatedDevice(directed=True)
    out = torch.zeros(4, 1)
    transfer = device.launch([(rows(1, 2, 3, 4), out)])
    del transfer
    device.land_all()
    assert poisoned(out)


def test_without_the_freeze_live_rows_land() -> None:
    """`READS_LIVE_ROWS`: what the next forward wrote arrives."""
    device = SimulatedDevice(directed=True, faults=[Fault.READS_LIVE_ROWS])
    live, out = rows(1, 2), torch.empty(2, 1)
    device.launch([(live, out)])
    live.fill_(9)
    device.land_all()
    assert out[:, 0].tolist() == [9, 9]


def test_without_holding_the_frozen_rows_poison_lands() -> None:
    """`DROPS_FROZEN_ROWS`: the memory is given back before it was read."""
    device = SimulatedDevice(directed=True, faults=[Fault.DROPS_FROZEN_ROWS])
    out = torch.empty(2, 1)
    transfer = device.launch([(rows(1, 2), out)])
    device.land_all()
    assert poisoned(out)
    assert transfer.landed()


def test_without_waiting_nothing_has_landed() -> None:
    """`WAITS_FOR_NOTHING`: the wait returns, the rows are not there."""
    device = SimulatedDevice(directed=True, faults=[Fault.WAITS_FOR_NOTHING])
    out = torch.empty(2, 1)
    device.launch([(rows(1, 2), out)]).wait()
    assert poisoned(out)


def test_a_wait_ends_with_the_last_piece() -> None:
    """A thread waits for the transfer until another one has landed it."""
    device = SimulatedDevice(directed=True)
    transfer = device.launch([(rows(1, 2, 3), torch.empty(3, 1))])
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(transfer.wait)
        assert device.until_waited(LIMIT_S)
        assert not waiter.done()
        device.land_all()
        waiter.result(LIMIT_S)


def test_nothing_waits_for_ever() -> None:
    """A wait that nobody ends, and a hold that nobody releases, raise."""
    device = SimulatedDevice(directed=True, patience_s=0.01)
    transfer = device.launch([(rows(1), torch.empty(1, 1))])
    with pytest.raises(SimulatedDeviceError, match=r"pieces of launch 1 have not landed within 0.01 s"):
        transfer.wait()
    device.hold("clone")
    with pytest.raises(SimulatedDeviceError, match="nobody released clone"):
        device.clone(rows(1), torch.float32)
    assert not device.until_waited(0.01)


@pytest.mark.parametrize("operation", ["clone", "launch", "wait", "copy_to_host", "rows_to_host", "gather_to_host"])
def test_each_operation_fails_when_told(operation: str) -> None:
    """Once, at the call that was named, with the error that was given."""
    device = SimulatedDevice()
    source, out = rows(1, 2), torch.empty(2, 1)

    def call() -> None:
        match operation:
            case "clone":
                device.clone(source, torch.float32)
            case "launch":
                device.launch([(source, out)])
            case "wait":
                device.launch([(source, out)]).wait()
            case "copy_to_host":
                device.copy_to_host(source, out)
            case "rows_to_host":
                device.rows_to_host(source, np.array([1, 0]), out)
            case _:
                device.gather_to_host([source], 100)

    device.fail(operation, after=1, error=OSError("gone"))
    device.fail(operation)
    call()
    with pytest.raises(OSError, match="gone"):
        call()
    with pytest.raises(SimulatedDeviceError, match=f"{operation} was made to fail"):
        call()
    call()


def test_a_held_operation_stops_one_thread() -> None:
    """The next thread to start it stands there until the release; the one after goes through."""
    seen: list[str] = []
    device = SimulatedDevice(on_call=seen.append)
    held = device.hold("clone")
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(device.clone, rows(1), torch.float32)
        assert held.reached.wait(LIMIT_S)
        device.clone(rows(2), torch.float32)
        assert not stopped.done()
        held.release()
        assert stopped.result(LIMIT_S).item() == 1
    assert seen == ["clone", "clone"]


def test_totals_count_what_was_done() -> None:
    """Launches, copies, clones, waits and their bytes."""
    device = SimulatedDevice()
    clone = device.clone(rows(1, 2, 3), torch.float32)
    device.launch([(rows(1, 2), torch.empty(2, 1)), (rows(1), torch.empty(1, 1))]).wait()
    gathered = device.gather_to_host([clone[:1], clone[2:]], 4)
    assert gathered[:, 0].tolist() == [1, 3]
    assert device.totals == DeviceTotals(
        launches=1, copies=2 + 2, copied_bytes=12 + 8, clones=1, cloned_bytes=12, waits=1
    )


def test_memory_released_by_another_thread_is_counted() -> None:
    """A finaliser takes no lock, whichever thread it runs on."""
    device = SimulatedDevice()
    kept = [device.clone(rows(1, 2), torch.float32) for _ in range(10)]
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join(LIMIT_S)
    assert device.live_bytes == 0


@pytest.mark.parametrize("seed", range(10))
def test_a_serial_scheduler_may_stand_behind_it(seed: int) -> None:
    """Its waits are those of the runtime: another thread lands the copy, and no real time passes."""
    runtime = SerialRuntime(Uniform(seed))
    device = SimulatedDevice(seed, directed=True, runtime=runtime)
    out = torch.empty(3, 1)

    def program() -> None:
        transfer = device.launch([(rows(1, 2, 3), out)])
        lands = runtime.spawn("device", device.land_all)
        transfer.wait()
        assert out[:, 0].tolist() == [1, 2, 3]
        lands.join()

    runtime.run(program)
    assert runtime.monotonic() == 0.0


def test_its_patience_is_the_runtimes() -> None:
    """A wait that nobody ends is given up at once, by a clock that is virtual."""
    runtime = SerialRuntime(Uniform(0))
    device = SimulatedDevice(directed=True, patience_s=1e6, runtime=runtime)

    def program() -> None:
        with pytest.raises(SimulatedDeviceError, match="have not landed"):
            device.launch([(rows(1), torch.empty(1, 1))]).wait()

    runtime.run(program)
    assert runtime.monotonic() == 1e6


def test_time_passes_when_told() -> None:
    """Pieces land by and by without a call of the code above; never if the test lands them."""
    device, directed = SimulatedDevice(4), SimulatedDevice(4, directed=True)
    transfers = [d.launch([(rows(1, 2, 3), torch.empty(3, 1))]) for d in (device, directed)]
    for _ in range(100):
        device.time_passes()
        directed.time_passes()
    assert device.pending == 0
    assert transfers[0].landed()
    assert not transfers[1].landed()
