"""A filled hall respects every limit; moving services out makes space for more GPUs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lakh.errors import ConfigError, UserError
from lakh.planner.facility.hall import DataHall, HallLayout, fill_hall, load_hall, scenarios

HALL = load_hall()


def check(hall: DataHall, found: HallLayout) -> None:
    floor = "".join(found.placement)
    racks = sum(character.isdigit() for character in floor)
    assert racks == found.gpu_racks
    assert found.gpus == racks * found.servers_per_rack * hall.gpu.gpus_per_server == sum(found.zones)
    assert floor.count("N") == found.network_racks >= found.gpus / hall.network.gpus_per_rack
    assert len(floor) <= hall.rows * hall.racks_per_row
    assert floor.count("S") == found.support_racks
    assert all(zone <= hall.network.gpus_per_zone for zone in found.zones)
    assert found.longest_cable_m <= hall.cable_limit_m
    # network racks are whole racks, so each zone may draw one more of them than its share
    assert found.power_kW <= hall.power_kW + len(found.zones) * hall.network.kW_per_rack


@pytest.mark.slow
@settings(max_examples=25)
@given(power_kW=st.floats(1500, 20000), cable_m=st.floats(8, 80), rows=st.integers(6, 12), servers=st.integers(1, 4))
def test_a_filled_hall_stays_within_every_limit(power_kW: float, cable_m: float, rows: int, servers: int) -> None:
    gpu = replace(HALL.gpu, servers_per_rack=servers, air_limit_kW_per_rack=60.0)
    support = (replace(HALL.support[0], racks=10),)
    hall = replace(HALL, power_kW=power_kW, cable_limit_m=cable_m, rows=rows, gpu=gpu, support=support)
    check(hall, fill_hall(hall))


def test_moving_readers_out_of_an_air_cooled_hall_makes_space_for_gpus() -> None:
    as_it_is, readers, storage, both, liquid = scenarios(HALL)
    assert as_it_is.gpus < storage.gpus < readers.gpus < both.gpus <= liquid.gpus
    assert as_it_is.servers_per_rack == 2  # 24 kW of air a rack carry two servers of 10.2 kW
    assert liquid.servers_per_rack > 2
    assert both.zones[0] == HALL.network.gpus_per_zone
    for one in (as_it_is, readers, both):
        check(HALL, one)


def test_a_short_cable_makes_a_small_zone() -> None:
    far, near = fill_hall(HALL), fill_hall(replace(HALL, cable_limit_m=10.0))
    assert near.zones[0] < far.zones[0]
    assert near.longest_cable_m <= 10.0


def test_more_power_or_floor_space_never_reduces_the_gpus() -> None:
    assert fill_hall(replace(HALL, power_kW=16000.0, air_cooling_kW=16000.0)).gpus >= fill_hall(HALL).gpus
    assert fill_hall(replace(HALL, rows=20)).gpus >= fill_hall(HALL).gpus


def test_a_server_that_exceeds_the_rack_cooling_gives_an_empty_hall() -> None:
    found = fill_hall(replace(HALL, gpu=replace(HALL.gpu, air_limit_kW_per_rack=9.0)))
    assert found.gpus == 0
    assert "10.2 kW exceeds the air cooling of a rack" in found.binds


def test_services_that_are_not_movable_are_refused() -> None:
    with pytest.raises(UserError, match="choose from: readers, storage"):
        fill_hall(HALL, moved=("management",))
    with pytest.raises(ConfigError, match="not longer than the slack"):
        replace(HALL, cable_limit_m=1.0)
