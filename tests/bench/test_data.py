"""The readers: small files in the form of the releases, and the real ones if there."""

import gzip
import hashlib
import os
import pickle
from pathlib import Path

import data_for_tests as small
import numpy as np
import pytest

from stormplus.bench import data
from stormplus.bench.data import MissingData, load
from stormplus.bench.download import RELEASES

REAL = os.environ.get(data.VARIABLE)


@pytest.fixture(autouse=True)
def _small(monkeypatch, request):
    monkeypatch.delenv(data.VARIABLE, raising=False)
    if "real" not in request.node.name:
        small.make_small(monkeypatch)


@pytest.mark.parametrize("inside", ["cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"])
def test_cifar10_is_read_record_by_record(tmp_path, inside):
    small.write_cifar10(tmp_path / inside)
    images = load("cifar10", tmp_path)
    rows = np.concatenate([small.cifar10_rows(k) for k in range(1, 6)])
    assert images.train_x.shape == (5 * small.CIFAR_RECORDS, 3, 32, 32)
    assert images.test_x.shape == (small.CIFAR_RECORDS, 3, 32, 32)
    np.testing.assert_array_equal(images.train_y, rows[:, 0])
    # Record 9: red, green and blue planes of 1024 bytes, row by row.
    np.testing.assert_array_equal(images.train_x[9, 1, 2], rows[9, 1 + 1024 + 64 : 1 + 1024 + 96])
    np.testing.assert_array_equal(images.test_x.reshape(-1, 3072), small.cifar10_rows(6)[:, 1:])
    np.testing.assert_array_equal(images.test_y, small.cifar10_rows(6)[:, 0])
    assert_contract(images)


@pytest.mark.parametrize(
    "rename",
    [
        lambda stem: f"{stem}.gz",
        lambda stem: stem,
        lambda stem: stem.replace("-idx", ".idx"),
        lambda stem: f"{stem}.idx",
        lambda stem: stem.split("-idx")[0] + ".idx",
    ],
    ids=["released", "unzipped", "dotted", "released.idx", "plain.idx"],
)
def test_mnist_is_read_under_every_usual_name(tmp_path, rename):
    small.write_mnist(tmp_path, rename)
    images, arrays = load("mnist", tmp_path), small.mnist_arrays()
    np.testing.assert_array_equal(images.train_x[:, 0], arrays["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(images.train_y, arrays["train-labels-idx1-ubyte"])
    np.testing.assert_array_equal(images.test_x[:, 0], arrays["t10k-images-idx3-ubyte"])
    np.testing.assert_array_equal(images.test_y, arrays["t10k-labels-idx1-ubyte"])
    assert_contract(images)


def assert_contract(images):
    for array in (images.train_x, images.test_x):
        assert array.dtype == np.uint8
        assert array.flags.c_contiguous
        assert array.flags.writeable  # torch.from_numpy warns otherwise
    for array in (images.train_y, images.test_y):
        assert array.dtype == np.int64


def test_shakespeare_is_split_by_position(tmp_path):
    small.write_shakespeare(tmp_path)
    text = load("shakespeare", tmp_path)
    content = small.SENTENCE.decode()
    assert text.vocabulary == "".join(sorted(set(content)))
    assert len(text.train) == len(content) * 9 // 10
    codes = np.concatenate([text.train, text.test])
    assert codes.dtype == text.train.dtype == text.test.dtype == np.int64
    assert "".join(text.vocabulary[code] for code in codes) == content


def test_the_folder_is_the_environments(tmp_path, monkeypatch):
    small.write_shakespeare(tmp_path)
    monkeypatch.setenv(data.VARIABLE, str(tmp_path))
    assert len(data.shakespeare().test) > 0


@pytest.mark.parametrize("name", data.NAMES)
def test_without_a_folder_the_message_says_what_to_do(name):
    with pytest.raises(MissingData, match=f"set STORMPLUS_DATA.*`stormplus data {name}`.*place"):
        load(name)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("cifar10", "cifar10/cifar-10-batches-bin/data_batch_1.bin"),
        ("mnist", "mnist/train-images-idx3-ubyte.gz"),
        ("shakespeare", "tinyshakespeare/input.txt"),
    ],
)
def test_a_missing_data_set_names_the_file_and_the_command(tmp_path, name, first):
    folder = tmp_path / "my data"
    with pytest.raises(MissingData) as caught:
        load(name, folder)
    assert str(folder / first) in str(caught.value)
    assert f"`stormplus data {name} --folder '{folder}'`" in str(caught.value)
    assert f"place {data.place(name, folder)}" in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)


def test_one_missing_file_of_several_is_named(tmp_path):
    small.write_cifar10(tmp_path / "cifar-10-batches-bin")
    small.write_mnist(tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin").unlink()
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(MissingData, match=r"data_batch_4.bin does not exist"):
        load("cifar10", tmp_path)
    with pytest.raises(MissingData, match=r"t10k-labels-idx1-ubyte.gz does not exist"):
        load("mnist", tmp_path)


def test_an_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match="no data set 'imagenet': choose from cifar10, mnist"):
        load("imagenet")


def test_a_cifar10_file_of_the_wrong_size_is_refused(tmp_path):
    small.write_cifar10(tmp_path / "cifar-10-batches-bin")
    file = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-3073])  # a whole record less
    with pytest.raises(ValueError, match=r"data_batch_3.bin is not .*18438 bytes, expected 21511"):
        load("cifar10", tmp_path)


def test_a_label_that_is_no_class_is_refused(tmp_path):
    small.write_cifar10(tmp_path / "cifar-10-batches-bin")
    file = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    file.write_bytes(b"\x0a" + file.read_bytes()[1:])
    with pytest.raises(ValueError, match=r"test_batch.bin .*a label is 10, expected less than 10"):
        load("cifar10", tmp_path)


IMAGES = small.idx(small.mnist_arrays()["train-images-idx3-ubyte"])
LABELS = small.idx(small.mnist_arrays()["train-labels-idx1-ubyte"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(IMAGES)[:-100], "gzip cannot read it"),
        (gzip.compress(IMAGES)[:20] + b"\xff" * 50, "gzip cannot read it"),
        (b"<html>404</html>", "gzip cannot read it"),
        (b"", "it starts with b''"),
        (gzip.compress(LABELS), r"it starts with b'\\x00\\x00\\x08\\x01', expected b"),
        (gzip.compress(IMAGES[:9]), "it announces shape"),
        (gzip.compress(small.idx(np.zeros((5, 28, 27), np.uint8))), r"shape \(5, 28, 27\), exp"),
        (gzip.compress(IMAGES[:-1]), "3919 bytes after its header, expected 3920"),
    ],
    ids=["truncated", "garbled", "not gz", "empty", "magic", "header", "shape", "size"],
)
def test_a_broken_mnist_file_is_named(tmp_path, content, message):
    small.write_mnist(tmp_path)
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load("mnist", tmp_path)
    assert "mnist/train-images-idx3-ubyte.gz is not the released file" in str(caught.value)
    assert "delete it and run `stormplus data mnist`" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "0 bytes, expected"),
        (small.SENTENCE.replace(b"\n", b"\r\n"), "176 bytes, expected 172"),
        (b"\xff" + small.SENTENCE[1:], "not plain ASCII text"),
    ],
    ids=["empty", "line ends", "bytes"],
)
def test_another_text_is_refused(tmp_path, text, message):
    small.write_shakespeare(tmp_path, text)
    with pytest.raises(ValueError, match=f"input.txt is not the released file: {message}"):
        load("shakespeare", tmp_path)


class Bomb:
    """A pickle that leaves a mark when it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_no_pickle_is_loaded(tmp_path):
    mark = tmp_path / "loaded"
    bomb = pickle.dumps(Bomb(mark))
    names = (*data.CIFAR10_TRAIN, data.CIFAR10_TEST)
    for inside in ("cifar-10-batches-bin", "cifar-10-batches-py"):  # the second is Python's release
        (tmp_path / inside).mkdir()
        for name in (*names, *(name.removesuffix(".bin") for name in names)):
            (tmp_path / inside / name).write_bytes(bomb)
    small.write_mnist(tmp_path)
    for file in (tmp_path / "mnist").iterdir():
        file.write_bytes(gzip.compress(bomb))
    small.write_shakespeare(tmp_path, bomb)
    for name in data.NAMES:
        with pytest.raises(ValueError, match="is not the released file"):
            load(name, tmp_path)
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists()  # it would have told


@pytest.mark.skipif(not REAL, reason=f"{data.VARIABLE} is not set: the real files are not read")
class TestReal:
    def read(self, name):
        try:
            return load(name, REAL)
        except MissingData as error:
            pytest.skip(str(error))

    def test_real_cifar10(self):
        images = self.read("cifar10")
        assert images.train_x.shape == (50_000, 3, 32, 32)
        assert images.test_x.shape == (10_000, 3, 32, 32)
        assert np.bincount(images.train_y).tolist() == [5000] * 10
        assert np.bincount(images.test_y).tolist() == [1000] * 10
        # The known means of the channels; a wrong order of planes or bytes would not give them.
        means = images.train_x.mean(axis=(0, 2, 3)) / 255
        np.testing.assert_allclose(means, [0.4914, 0.4822, 0.4465], atol=2e-3)

    def test_real_mnist(self):
        images = self.read("mnist")
        assert images.train_x.shape == (60_000, 1, 28, 28)
        assert images.train_y[:5].tolist() == [5, 0, 4, 1, 9]
        assert images.test_y[:5].tolist() == [7, 2, 1, 0, 4]
        # The published md5 of the unzipped file.
        whole = small.idx(images.train_x[:, 0])
        assert hashlib.md5(whole).hexdigest() == "6bbc9ace898e44ae57da46a324031adb"

    def test_real_shakespeare(self):
        text = self.read("shakespeare")
        assert len(text.vocabulary) == 65
        assert (len(text.train), len(text.test)) == (1_003_854, 111_540)
        start = "".join(text.vocabulary[code] for code in text.train[:14])
        assert start == "First Citizen:"

    def test_real_shakespeare_has_the_checksum_of_the_registry(self):
        self.read("shakespeare")
        content = (Path(REAL) / "tinyshakespeare" / "input.txt").read_bytes()
        [remote] = RELEASES["shakespeare"].remotes
        assert remote.checksum == f"sha256:{hashlib.sha256(content).hexdigest()}"
