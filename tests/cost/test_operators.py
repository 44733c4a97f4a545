"""Operators take what their tiles, instructions and bytes take of each engine."""

import pytest

from optimum_trn.cost import CALIBRATION, MACHINES, PRICES, get_machine, get_price
from optimum_trn.cost.operators import Chain, Demand, Matmul

CORE = get_machine("trn1.32xlarge").core
CONSTANTS = CALIBRATION["trainium"]


def test_a_large_product_reaches_its_peak_but_for_the_start_of_each_instruction():
    demand = Matmul(4096, 4096, 4096, 2).demand(CORE, CONSTANTS)
    assert demand.flops / demand.matrix == pytest.approx(CORE.matrix_flops["bf16"] * 512 / (512 + 64))


def test_float32_takes_four_times_as_long_to_move_and_as_long_to_start():
    half, full = (Matmul(512, 128, 128, size).demand(CORE, CONSTANTS) for size in (2, 4))
    assert full.matrix / half.matrix == pytest.approx((4 * 512 + 64) / (512 + 64))


def test_a_head_of_64_uses_half_of_the_rows():
    narrow, wide = (Matmul(512, k, 512, 2).demand(CORE, CONSTANTS) for k in (64, 128))
    assert narrow.matrix == wide.matrix and narrow.flops == wide.flops / 2


def test_short_rows_cost_an_instruction_each():
    short, long = (Chain(1e6, 1, 0, row).demand(CORE, CONSTANTS) for row in (128, 2048))
    assert short.vector > 1.5 * long.vector


def test_engines_run_beside_each_other_as_far_as_they_are_concurrent():
    demand = Demand(matrix=3.0, vector=2.0, memory=1.0)
    assert demand.seconds(0.0) == 6 and demand.seconds(1.0) == 3 and demand.seconds(0.5) == 4.5


def test_every_machine_says_where_its_numbers_are_from():
    for machine in MACHINES.values():
        assert machine.source and machine.core.source
        assert machine.num_cores in machine.launchable
    assert {"trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge", "trn2.48xlarge-lnc1", "p4d.24xlarge"} <= set(MACHINES)
    two, one = get_machine("trn2.48xlarge"), get_machine("trn2.48xlarge-lnc1")
    assert two.num_cores == 64 and one.num_cores == 128 and two.core.hbm_bytes == 2 * one.core.hbm_bytes


def test_prices_carry_region_date_and_source_and_give_way_to_the_callers():
    assert all(price.region and price.date and price.source for price in PRICES.values())
    own = get_price("trn1.32xlarge", 8.0)
    assert own is not None and own.dollars_per_hour == 8.0
    assert get_price("trn3.ultraserver") is None


def test_an_unknown_machine_is_named():
    with pytest.raises(ValueError, match=r"Unknown instance 'trn9'.*trn1.32xlarge"):
        get_machine("trn9")
