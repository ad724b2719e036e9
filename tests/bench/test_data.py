"""The readers of the data sets, and `stormplus data`."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tests.support import bench_data as small

from stormplus_bench import data
from stormplus_bench.commands.data import data as command
from stormplus_bench.data import MissingData, load


@pytest.fixture
def folder(monkeypatch, tmp_path):
    small.make_small(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def server(monkeypatch, folder):
    return small.Downloads(monkeypatch)


def run(*arguments):
    return CliRunner().invoke(command, list(arguments))


def test_the_default_folder_is_in_the_users_cache(monkeypatch):
    monkeypatch.delenv(data.VARIABLE, raising=False)
    assert data.data_folder().name == "stormplus"
    assert data.data_folder("~/mine") == Path.home() / "mine"


def test_every_data_set_is_downloaded_once_and_read(server, folder):
    done = run(*data.NAMES)
    assert done.exit_code == 0, done.output
    files = {path.name for path in folder.rglob("*") if path.is_file()}
    assert files == {*data.CIFAR10_FILES, *server.content} - {"cifar-10-binary.tar.gz"}
    assert run(*data.NAMES).exit_code == 0
    assert len(server.requests) == 6
    images = load("cifar10")
    records = np.concatenate([small.cifar10_records(k) for k in range(1, 6)])
    # Record 9: red, green and blue planes of 1024 bytes, row by row.
    np.testing.assert_array_equal(images.train_x[9, 1, 2], records[9, 1 + 1024 :][64:96])
    np.testing.assert_array_equal(images.train_y, records[:, 0])
    np.testing.assert_array_equal(images.test_y, small.cifar10_records(6)[:, 0])
    assert images.train_x.flags.writeable  # torch.from_numpy warns otherwise
    images, arrays = load("mnist"), small.mnist_arrays()
    np.testing.assert_array_equal(images.train_x[:, 0], arrays["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(images.test_y, arrays["t10k-labels-idx1-ubyte"])
    assert images.train_y.dtype == np.int64
    text = load("shakespeare")
    codes = np.concatenate([text.train, text.test])
    assert "".join(text.vocabulary[code] for code in codes) == small.SENTENCE.decode()
    assert len(text.train) == len(codes) * 9 // 10


def test_missing_data_names_the_file_and_the_command(folder):
    for name, file in (("cifar10", "data_batch_1.bin"), ("mnist", "train-images-idx3-ubyte.gz")):
        with pytest.raises(MissingData, match=f"{file} does not exist: run `stormplus data {name}"):
            load(name)
    with pytest.raises(ValueError, match="no data set 'imagenet': choose from cifar10, mnist"):
        load("imagenet")
    done = run()
    assert (done.exit_code, done.output.count("  missing")) == (0, 3)
    assert run("imagenet").exit_code == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>404</html>", "gzip cannot read it"),
        (gzip.compress(b"short"), "5 bytes, expected 3936"),
        (gzip.compress(bytes(3936)), "its header is"),
    ],
    ids=["no archive", "too short", "no header"],  # gzip's bytes have the time in them
)
def test_another_file_is_refused_and_left_alone(server, folder, content, message):
    file = folder / "mnist" / "train-images-idx3-ubyte.gz"
    file.parent.mkdir()
    file.write_bytes(content)
    done = run("mnist")
    assert done.exit_code == 1
    assert f"{file.name} is not the released file: {message}" in done.stderr
    assert file.read_bytes() == content


@pytest.mark.parametrize("spoil", ["other", "gone"])
def test_a_failed_download_leaves_nothing_and_says_what_to_copy(server, folder, spoil):
    server.spoil = {"cifar-10-binary.tar.gz": spoil}
    done = run("cifar10", "shakespeare")
    assert done.exit_code == 1
    assert f"copy the file to {folder / 'cifar-10-binary.tar.gz'}" in done.stderr
    assert [p.name for p in folder.rglob("*") if p.is_file()] == ["input.txt"]  # the next one
    server.spoil = {}
    assert run("cifar10").exit_code == 0


def test_an_interruption_has_its_exit_code(folder, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "download", interrupt)
    assert run("mnist").exit_code == 130
