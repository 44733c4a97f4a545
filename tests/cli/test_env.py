"""`optimum-trn env` shows what is simulated and where ranks are placed, and says a user's mistake in one line."""

import pytest

from optimum_trn.cli import main


def test_env_shows_the_hardware_and_the_placement(capsys, monkeypatch):
    monkeypatch.setenv("OPTIMUM_TRN_INSTANCE", "trn2.48xlarge")
    main(["env", "--tensor-parallel-size", "4", "--world-size", "128"])
    text = capsys.readouterr().out
    assert "16 x Trainium2, 4 cores a chip, 24 GiB a core" in text
    assert "128 ranks on 2 nodes" in text and "tp: 32 groups of 4, inside a chip" in text


def test_degrees_that_do_not_multiply_out_are_one_line_without_a_traceback(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["env", "--tensor-parallel-size", "3", "--world-size", "8"])
    assert stop.value.code == 2
    assert "tensor_parallel_size 3 does not divide the world size 8" in capsys.readouterr().err
