"""Collectives take what nccom-test published, and what the links of a torus allow."""

import pytest

from benchmarks.published import ROWS, all_reduce_tables, read
from optimum_trn.cost import get_machine
from optimum_trn.cost.collectives import Group, all_gather, all_reduce, all_to_all, group, ring_rate, send

TRN1 = get_machine("trn1.32xlarge")
MB = 1 << 20


def test_the_published_all_reduce_tables_are_met_at_every_size():
    tables = all_reduce_tables(read(ROWS))
    assert len(tables) == 24
    for entry in tables:
        assert abs(entry["error"]) <= 0.25, entry


def test_the_published_all_gather_over_32_ranks_is_met():
    for size, seconds in ((1024, 151e-6), (65536, 150e-6), (524288, 179e-6)):  # SDK nccom-test.rst
        assert all_gather(size, Group(32, 32), TRN1) == pytest.approx(seconds, rel=0.15)


def test_rings_share_the_links_of_the_torus():
    alone, column, over_two = ring_rate(TRN1, 8, 1), ring_rate(TRN1, 4, 8), ring_rate(TRN1, 8, 4)
    assert alone == TRN1.ring_bytes_per_second
    assert column == TRN1.link_bytes_per_second / 2, "the rings of both cores of a chip share its column's links"
    assert over_two < column, "hops over two links load twice as many"
    assert ring_rate(TRN1, 32, 1) == 2 * alone, "a torus has two rings without a common link, a row of it one"


def test_a_switch_gives_every_chip_its_rate():
    machine = get_machine("p4d.24xlarge")
    assert ring_rate(machine, 8, 1) == ring_rate(machine, 2, 4) == machine.ring_bytes_per_second


def test_groups_span_nodes_where_their_stride_takes_them():
    assert group(TRN1, 64, 8) == Group(64, 4, 8)
    assert group(TRN1, 8, 1).nodes == 1
    assert group(TRN1, 16, 32) == Group(16, 1, 32)


def test_groups_that_share_a_network_take_longer():
    one, eight = Group(64, 32), Group(64, 4, 8)
    assert all_reduce(64 * MB, eight, TRN1) > all_reduce(64 * MB, one, TRN1)


def test_more_network_and_more_links_help_where_they_should():
    more_network = get_machine("trn1n.32xlarge")
    ranks = Group(512, 32)
    assert all_reduce(512 * MB, ranks, more_network) < all_reduce(512 * MB, ranks, TRN1)
    assert all_reduce(512 * MB, Group(32, 32), more_network) < all_reduce(512 * MB, Group(32, 32), TRN1)


def test_one_rank_needs_no_collective():
    alone = Group(1, 1)
    assert all_gather(MB, alone, TRN1) == all_reduce(MB, alone, TRN1) == all_to_all(MB, alone, TRN1) == 0


def test_what_crosses_nodes_takes_longer():
    assert send(MB, 32, TRN1) > send(MB, 8, TRN1)
    assert all_to_all(64 * MB, Group(64, 32), TRN1) > all_to_all(64 * MB, Group(32, 32), TRN1)
