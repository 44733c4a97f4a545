"""An iterable data set on data-parallel ranks: every row exactly once, equally many for each rank."""

import pytest
from torch.utils.data import DataLoader

from optimum_trn.trainer.stream import DataParallelStream
from tests.trainer.scenario import Stream


def streams(count, ranks, batch_size=2, **options):
    loader = DataLoader(Stream(list(range(count))), batch_size=batch_size, drop_last=options.pop("drop_last", False))
    return [DataParallelStream(loader, ranks, rank, dispatch=False, **options) for rank in range(ranks)]


@pytest.mark.parametrize("count", range(1, 14))
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_row_is_read_once_and_ranks_have_as_many(count, ranks):
    shares = []
    for stream in streams(count, ranks):
        stream.loader = stream  # anything that takes an attribute
        shares.append(list(stream))
        assert stream.num_examples == count
        assert stream.remainder == (count % (2 * ranks) or 2 * ranks)
    assert len({len(share) for share in shares}) == 1
    whole, last = divmod(count, 2 * ranks)
    in_order = [row for batch in range(whole) for share in shares for row in share[2 * batch : 2 * batch + 2]]
    in_order += [row for share in shares for row in share[2 * whole :]][:last]
    assert in_order == list(range(count))


def test_the_last_batch_is_filled_with_the_first_rows():
    assert [list(stream) for stream in streams(5, 2)] == [[0, 1, 4], [2, 3, 0]]


def test_a_partial_batch_is_dropped_if_asked_for():
    assert [list(stream) for stream in streams(7, 2, drop_last=True)] == [[0, 1], [2, 3]]


def test_split_batches_share_the_batch_of_the_loader():
    assert [list(stream) for stream in streams(8, 2, batch_size=4, split_batches=True)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    with pytest.raises(ValueError, match="batch size 3 is not a multiple of the 2 data-parallel ranks"):
        streams(8, 2, batch_size=3, split_batches=True)


def test_rows_of_several_workers_are_regrouped():
    loader = DataLoader(Stream(list(range(8))), batch_size=2, num_workers=2)
    shares = [list(DataParallelStream(loader, 2, rank, dispatch=False)) for rank in range(2)]
    assert sorted(shares[0] + shares[1]) == sorted(
        [*range(8), *range(8)]
    )  # each worker reads it all, as in stock torch
