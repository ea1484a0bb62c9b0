"""The comparison sees a difference: in outcomes, in tables, and where both are wrong together."""

from __future__ import annotations

import pytest

from conformance.drivers import agree
from conformance.drivers.reference import ReferenceDriver
from conformance.mutants import faults
from conformance.schedules import generate
from omni_prefix_ref import Machine


@pytest.mark.parametrize(
    ("fault", "seed", "what"),
    [
        (faults.HitRowsLeftOut, 0, "outputs"),
        (faults.SkipVersionBump, 0, "version"),
        (faults.UnchargePerTask, 0, "charged"),
    ],
)
def test_a_faulty_reference_disagrees(
    fault: type[Machine], seed: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault seeded into the reference model alone is told within 30 traces, by what differs first."""

    class Faulty(ReferenceDriver):
        def __init__(self, header: object, *, checked: bool) -> None:
            super().__init__(header, machine=fault, checked=checked)  # type: ignore[arg-type]

    monkeypatch.setattr(agree, "ReferenceDriver", Faulty)
    found = [agree.agree(generate(n).trace, checked=False) for n in range(seed, seed + 30)]
    assert any(d is not None and d.what.startswith(what) for d in found)
