"""Pipeline schedules are runnable, complete, keep no more activations than they say, and are those of torch."""

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from optimum_trn.parallel.schedules import STAGES_PER_RANK, actions, forward_actions, in_flight_bound

BACKWARDS = {"backward", "input gradient"}


def run(programs, num_stages):
    """Runs all programs step by step, each rank in its own order; the most activations that each rank kept."""
    done, positions = set(), [0] * len(programs)
    kept, peaks = [0] * len(programs), [0] * len(programs)

    def ready(kind, stage, micro_batch):
        if kind == "forward":
            return stage == 0 or ("forward", stage - 1, micro_batch) in done
        if kind in BACKWARDS:
            last = stage == num_stages - 1
            after = last or any((other, stage + 1, micro_batch) in done for other in BACKWARDS)
            return after and ("forward", stage, micro_batch) in done
        return ("input gradient", stage, micro_batch) in done

    while True:
        runnable = [
            (rank, program[position])
            for rank, (program, position) in enumerate(zip(programs, positions, strict=True))
            if position < len(program) and ready(*program[position])
        ]
        if not runnable:
            break
        for rank, action in runnable:
            done.add(action)
            positions[rank] += 1
            kept[rank] += (action.kind == "forward") - (action.kind in ("backward", "weight gradient"))
            peaks[rank] = max(peaks[rank], kept[rank])
    assert positions == [len(program) for program in programs], "the ranks wait for each other"
    return peaks


@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_any_number_of_micro_batches_runs_through_within_the_bound(schedule):
    for num_ranks in range(2, 9):
        for count in range(1, 21):
            programs = [actions(schedule, num_ranks, rank, count) for rank in range(num_ranks)]
            num_stages = num_ranks * STAGES_PER_RANK[schedule]
            kinds = 3 if schedule == "zero_bubble" else 2
            for rank, program in enumerate(programs):
                assert len(set(program)) == len(program) == kinds * STAGES_PER_RANK[schedule] * count
                assert {action.stage % num_ranks for action in program} == {rank}
            bounds = [in_flight_bound(schedule, num_ranks, rank, count) for rank in range(num_ranks)]
            assert run(programs, num_stages) == bounds, (num_ranks, count)


class Interleaved(torch_schedules.ScheduleInterleaved1F1B):
    """torch's schedule without stages to run."""

    def __init__(self, num_ranks, stages, count):
        self.pp_group_size, self.n_local_stages, self._n_microbatches = num_ranks, stages, count
        self._num_stages = num_ranks * stages
        self.number_of_rounds = max(1, count // num_ranks)
        self.microbatches_per_round = count // self.number_of_rounds


@pytest.mark.parametrize(("num_ranks", "count"), [(2, 4), (2, 6), (4, 8), (4, 4), (3, 9)])
def test_interleaved_1f1b_is_that_of_torch(num_ranks, count):
    for rank in range(num_ranks):
        theirs = Interleaved(num_ranks, 2, count)._calculate_single_rank_operations(rank)
        kinds = {torch_schedules.FORWARD: "forward", torch_schedules.FULL_BACKWARD: "backward"}
        theirs = [
            (kinds[action.computation_type], action.stage_index, action.microbatch_index) for action in theirs if action
        ]
        assert [tuple(action) for action in actions("interleaved_1f1b", num_ranks, rank, count)] == theirs


def test_evaluation_runs_every_stage_of_a_rank_once():
    assert [action.stage for action in forward_actions(4, 2, 1)] == [1, 3]
