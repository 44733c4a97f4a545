"""`optimum-trn pool` puts, lists and removes; a user's mistake is one line."""

import argparse

import pytest

from optimum_trn.cli import main
from optimum_trn.cli.pool import bytes_of
from tests.pool.pools import a_pool


@pytest.fixture
def pool(tmp_path, monkeypatch):
    with a_pool(2) as pool:
        pool.address.save(tmp_path / "pool.json")
        monkeypatch.setenv("OPTIMUM_TRN_POOL", str(tmp_path / "pool.json"))
        yield pool


def test_a_directory_is_put_listed_and_removed(pool, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    main(["pool", "put", str(tmp_path / "model"), "--replicas", "2"])
    assert "pool://model: 1 files, 2 bytes, hybrid, 2 copies" in capsys.readouterr().out
    main(["pool", "ls"])
    assert "pool://model  1 files  2 bytes\nstore 127.0.0.1:" in capsys.readouterr().out
    main(["pool", "rm", "model"])
    assert pool.files() == []


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["rm", "nothing"], "no nothing in the pool"),
        (["put", "DIRECTORY", "--replicas", "3"], "3 copies need as many stores, and 2 can be reached"),
        (["put", "DIRECTORY", "--strategy", "other"], "'other' is no way to spread a file"),
        (["put", "DIRECTORY", "--name", "a/../b"], "refused as a name"),
        (["serve", "--stores", "0"], "keeps nothing"),
    ],
)
def test_mistakes_are_said(pool, tmp_path, capsys, arguments, said):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        main(["pool", *(str(tmp_path / "model") if one == "DIRECTORY" else one for one in arguments)])
    assert said in capsys.readouterr().err


def test_without_a_pool_the_command_says_how_to_start_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPTIMUM_TRN_POOL", str(tmp_path / "pool.json"))
    with pytest.raises(SystemExit):
        main(["pool", "ls"])
    assert "optimum-trn pool serve" in capsys.readouterr().err


def test_sizes_are_written_with_units():
    assert (bytes_of("4GiB"), bytes_of("25MB"), bytes_of("1.5 KiB"), bytes_of("7")) == (4 << 30, 25_000_000, 1536, 7)
    with pytest.raises(argparse.ArgumentTypeError):
        bytes_of("4 gigs")
