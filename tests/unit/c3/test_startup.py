"""The start-up coefficients fit the measured points."""

import pytest

from lakh.spec.startup import STARTUP

MEASURED_MS = {
    "c3": {8: 1.6, 32: 1.9, 64: 2.5, 128: 3.6, 256: 7.4, 512: 16.8},
    "gloo": {8: 2.0, 32: 3.4, 64: 6.1, 128: 13.6},
}


@pytest.mark.parametrize("library", MEASURED_MS)
def test_the_coefficients_fit_the_measured_points(library) -> None:
    for ranks, measured_ms in MEASURED_MS[library].items():
        assert STARTUP[library].rank_cpu_s(ranks) * 1e3 == pytest.approx(measured_ms, rel=0.34)


def test_a_full_mesh_has_as_many_connections_as_peers_and_c3_a_logarithm() -> None:
    assert STARTUP["gloo"].connections(1024) == 1023
    assert STARTUP["c3"].connections(1024) == 20
    assert STARTUP["c3"].rank_wall_s(8, 0.01) == pytest.approx(0.0715, rel=0.05)
