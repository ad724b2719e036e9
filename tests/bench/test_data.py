"""The readers of the data sets, and `stormplus data` against a server on this machine."""

import gzip
import hashlib
import os
import pickle
import signal
import socket
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import bench_data as small
import numpy as np
import pytest
from bench_data import archive_of
from click.testing import CliRunner

from stormplus_bench import data, download
from stormplus_bench.commands.data import data as command
from stormplus_bench.data import MissingData, load
from stormplus_bench.download import RELEASES

REAL = os.environ.get(data.VARIABLE)


@pytest.fixture(autouse=True)
def _small(monkeypatch, request):
    if "real" not in request.node.name:
        small.make_small(monkeypatch)


def assert_contract(images):
    for array in (images.train_x, images.test_x):
        assert array.dtype == np.uint8
        assert array.flags.c_contiguous
        assert array.flags.writeable  # torch.from_numpy warns otherwise
    assert images.train_y.dtype == images.test_y.dtype == np.int64


@pytest.mark.parametrize("inside", ["cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"])
def test_cifar10_is_read_record_by_record(tmp_path, inside):
    small.write_cifar10(tmp_path / inside)
    images, test = load("cifar10", tmp_path), small.cifar10_records(6)
    records = np.concatenate([small.cifar10_records(k) for k in range(1, 6)])
    assert images.train_x.shape == (5 * small.CIFAR_RECORDS, 3, 32, 32)
    np.testing.assert_array_equal(images.train_y, records[:, 0])
    # Record 9: red, green and blue planes of 1024 bytes, row by row.
    green = records[9, 1 + 1024 :]
    np.testing.assert_array_equal(images.train_x[9, 1, 2], green[64:96])
    np.testing.assert_array_equal(images.test_x.reshape(-1, 3072), test[:, 1:])
    np.testing.assert_array_equal(images.test_y, test[:, 0])
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


def test_shakespeare_is_split_by_position_and_the_folder_is_the_environments(tmp_path, monkeypatch):
    small.write_shakespeare(tmp_path)
    monkeypatch.setenv(data.VARIABLE, str(tmp_path))
    text, content = load("shakespeare"), small.SENTENCE.decode()
    assert text.vocabulary == "".join(sorted(set(content)))
    assert len(text.train) == len(content) * 9 // 10
    codes = np.concatenate([text.train, text.test])
    assert codes.dtype == text.train.dtype == text.test.dtype == np.int64
    assert "".join(text.vocabulary[code] for code in codes) == content


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("cifar10", "cifar10/cifar-10-batches-bin/data_batch_1.bin"),
        ("mnist", "mnist/train-images-idx3-ubyte.gz"),
        ("shakespeare", "tinyshakespeare/input.txt"),
    ],
)
def test_a_missing_data_set_names_the_file_and_the_command(tmp_path, name, first):
    with pytest.raises(MissingData, match=f"set STORMPLUS_DATA.*`stormplus data {name}`.*place"):
        load(name)
    folder = tmp_path / "my data"
    with pytest.raises(MissingData) as caught:
        load(name, folder)
    assert str(folder / first) in str(caught.value)
    assert f"`stormplus data {name} --data-dir '{folder}'`" in str(caught.value)
    assert f"place {data.place(name, folder)}" in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)


def test_one_missing_file_of_several_is_named_and_an_unknown_name_lists_the_known(tmp_path):
    small.write_cifar10(tmp_path / "cifar-10-batches-bin")
    small.write_mnist(tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin").unlink()
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(MissingData, match=r"data_batch_4.bin does not exist"):
        load("cifar10", tmp_path)
    with pytest.raises(MissingData, match=r"t10k-labels-idx1-ubyte.gz does not exist"):
        load("mnist", tmp_path)
    with pytest.raises(ValueError, match="no data set 'imagenet': choose from cifar10, mnist"):
        load("imagenet")


packed = partial(gzip.compress, mtime=0)
IMAGES = small.idx(small.mnist_arrays()["train-images-idx3-ubyte"])
LABELS = small.idx(small.mnist_arrays()["train-labels-idx1-ubyte"])
RECORDS = small.cifar10_records(6).tobytes()
OTHER = np.zeros((5, 28, 27), np.uint8)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cifar10", RECORDS[:-3073], "18438 bytes, expected 21511"),  # a whole record less
        ("cifar10", b"\x0a" + RECORDS[1:], "a label is 10, expected less than 10"),
        ("mnist", packed(IMAGES)[:-100], "gzip cannot read it"),
        ("mnist", packed(IMAGES)[:20] + b"\xff" * 50, "gzip cannot read it"),
        ("mnist", b"<html>404</html>", "gzip cannot read it"),
        ("mnist", b"", "it starts with b''"),
        ("mnist", packed(LABELS), r"it starts with b'\\x00\\x00\\x08\\x01', expected b"),
        ("mnist", packed(IMAGES[:9]), "it announces shape"),
        ("mnist", packed(small.idx(OTHER)), r"shape \(5, 28, 27\), exp"),
        ("mnist", packed(IMAGES[:-1]), "3919 bytes after its header, expected 3920"),
        ("shakespeare", b"", "0 bytes, expected"),
        ("shakespeare", small.SENTENCE.replace(b"\n", b"\r\n"), "176 bytes, expected 172"),
        ("shakespeare", b"\xff" + small.SENTENCE[1:], "not plain ASCII text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # the same in every process
)
def test_a_broken_file_is_named(tmp_path, name, content, message):
    small.write_cifar10(tmp_path / "cifar-10-batches-bin")
    small.write_mnist(tmp_path)
    small.write_shakespeare(tmp_path)
    file = {
        "cifar10": "cifar-10-batches-bin/test_batch.bin",
        "mnist": "mnist/train-images-idx3-ubyte.gz",
        "shakespeare": "tinyshakespeare/input.txt",
    }[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"{file} is not the released file: .*{message}") as caught:
        load(name, tmp_path)
    assert f"delete it and run `stormplus data {name}`" in str(caught.value)


class Bomb:
    """A pickle that leaves a mark when it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_no_pickle_is_loaded(tmp_path):
    mark = tmp_path / "loaded"
    bomb = pickle.dumps(Bomb(mark))
    for inside in ("cifar-10-batches-bin", "cifar-10-batches-py"):  # the second is Python's release
        (tmp_path / inside).mkdir()
        for name in small.CIFAR_FILES:
            (tmp_path / inside / name).write_bytes(bomb)
            (tmp_path / inside / name.removesuffix(".bin")).write_bytes(bomb)
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
        content = (Path(REAL) / "tinyshakespeare" / "input.txt").read_bytes()
        [remote] = RELEASES["shakespeare"].remotes
        assert remote.checksum == f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.fixture
def server(monkeypatch):
    """A server of small releases, which the registry is made to name."""
    monkeypatch.setenv("NO_PROXY", "*")
    server = small.Server()
    server.take_over(monkeypatch)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


def run(*arguments):
    return CliRunner().invoke(command, [str(a) for a in arguments], prog_name="stormplus data")


def files_in(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_every_data_set_is_fetched_once_and_can_be_read(server, tmp_path):
    folder = tmp_path / "not there yet"
    result = run(*data.NAMES, "--data-dir", folder)
    assert result.exit_code == 0, result.output
    for name in data.NAMES:
        load(name, folder)
        assert f"{name}: fetched; use it with `export STORMPLUS_DATA='{folder}'`" in result.output
    # A bar for each file.
    assert f"{len(small.SENTENCE)}/{len(small.SENTENCE)} bytes" in result.stderr
    # The archive, its readme and its strangers are gone, and nothing temporary is left.
    names = [f"cifar10/cifar-10-batches-bin/{name}" for name in small.CIFAR_FILES]
    names += ["cifar10/cifar-10-batches-bin/batches.meta.txt", "tinyshakespeare/input.txt"]
    names += [f"mnist/{name}" for name in small.mnist_files()]
    assert files_in(tmp_path) == sorted(f"{folder.name}/{name}" for name in names)
    assert (folder / "tinyshakespeare/input.txt").stat().st_mode & 0o044  # others may read it
    server.requests.clear()
    result = run(*data.NAMES, "--data-dir", folder)
    assert result.exit_code == 0
    assert server.requests == []
    assert f"mnist: already in {folder}" in result.output


def test_only_the_missing_file_is_fetched(server, tmp_path, monkeypatch):
    small.write_mnist(tmp_path)
    (tmp_path / "mnist/t10k-images-idx3-ubyte.gz").unlink()
    # A copy that somebody compressed again has another checksum, and the same images.
    again = tmp_path / "mnist/train-images-idx3-ubyte.gz"
    again.write_bytes(gzip.compress(gzip.decompress(again.read_bytes()), 1))
    assert again.read_bytes() != server.content[again.name]
    monkeypatch.setenv(data.VARIABLE, str(tmp_path))  # instead of --data-dir
    assert run("mnist").exit_code == 0
    assert server.requests == ["t10k-images-idx3-ubyte.gz"]


@pytest.mark.parametrize("name", ["cifar10", "shakespeare"])  # md5 and sha256
def test_another_content_is_not_kept(server, tmp_path, name):
    server.spoil = dict.fromkeys(server.content, "other")
    result = run(name, "--data-dir", tmp_path)
    remote = RELEASES[name].remotes[0]
    assert result.exit_code == 1
    assert f"does not have the checksum {remote.checksum}, and was not kept" in result.stderr
    assert f"{remote.url}\n      as {tmp_path / remote.path}\n" in result.stderr
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("spoil", ["cut", "gone"])
def test_a_failed_download_leaves_nothing_and_can_be_repeated(server, tmp_path, spoil):
    archive = tmp_path / "cifar-10-binary.tar.gz"
    server.spoil = {archive.name: spoil}
    if spoil == "gone":
        archive.write_bytes(b"half of it")  # placed by hand, and wrong: asked for again
    result = run("cifar10", "--data-dir", tmp_path)
    assert result.exit_code == 1
    assert f"cannot fetch {RELEASES['cifar10'].remotes[0].url}" in result.stderr
    assert f"      as {archive}\n" in result.stderr
    server.spoil = {}
    assert run("cifar10", "--data-dir", tmp_path).exit_code == 0
    load("cifar10", tmp_path)


def test_the_files_before_a_failure_stay_and_the_others_are_still_tried(server, tmp_path):
    server.spoil = {"t10k-labels-idx1-ubyte.gz": "cut"}
    result = run("mnist", "shakespeare", "--data-dir", tmp_path)
    assert result.exit_code == 1
    assert "shakespeare: fetched" in result.output
    assert len(files_in(tmp_path / "mnist")) == 3
    assert result.stderr.count("\n      as ") == 1  # only the missing one is asked for
    server.spoil, server.requests = {}, []
    assert run("mnist", "--data-dir", tmp_path).exit_code == 0
    assert server.requests == ["t10k-labels-idx1-ubyte.gz"]


def test_offline_the_message_says_what_to_place_where(server, tmp_path, monkeypatch):
    server.spoil = dict.fromkeys(server.content, "gone")
    result = run("mnist", "--data-dir", tmp_path)  # every missing file at once
    for remote in RELEASES["mnist"].remotes:
        assert f"    {remote.url}\n      as {tmp_path / remote.path}\n" in result.stderr
    server.requests.clear()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/cifar-10-binary.tar.gz"
        closed = replace(RELEASES["cifar10"].remotes[0], url=url)
        monkeypatch.setitem(RELEASES, "cifar10", replace(RELEASES["cifar10"], remotes=(closed,)))
        result = run("cifar10", "--data-dir", tmp_path)
    archive = tmp_path / "cifar-10-binary.tar.gz"
    assert result.exit_code == 1
    assert f"cannot fetch {url}" in result.stderr
    assert f"    {url}\n      as {archive}\nthen run `stormplus data cifar10" in result.stderr
    # Doing what it says helps, without a connection; the user's own file is left to the user.
    archive.write_bytes(server.content[archive.name])
    assert run("cifar10", "--data-dir", tmp_path).exit_code == 0
    load("cifar10", tmp_path)
    assert archive.exists()
    assert server.requests == []


def test_what_is_in_the_way_is_an_error_that_overwrites_nothing(server, tmp_path):
    small.write_shakespeare(tmp_path, b"my own text")
    result = run("shakespeare", "--data-dir", tmp_path)
    assert result.exit_code == 1
    assert "input.txt is not the released file: 11 bytes" in result.stderr
    assert (tmp_path / "tinyshakespeare/input.txt").read_bytes() == b"my own text"
    (tmp_path / "mnist").write_text("in the way")  # not a folder
    result = run("mnist", "--data-dir", tmp_path)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert str(tmp_path / "mnist") in result.stderr


def test_an_archive_without_a_file_is_refused(tmp_path):
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(archive_of({"cifar-10-batches-bin/test_batch.bin": b"x"}))
    with pytest.raises(ValueError, match=r"has no .*data_batch_1.bin"):
        download.unpack(archive, tmp_path / "release")
    archive.write_bytes(archive.read_bytes()[:-30])
    with pytest.raises(ValueError, match="cannot be unpacked"):
        download.unpack(archive, tmp_path / "release")


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(server, tmp_path):
    server.spoil = {"cifar-10-binary.tar.gz": "stall"}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt():
        assert server.half_sent.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        result = run("shakespeare", "cifar10", "mnist", "--data-dir", tmp_path)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 130, result.output
    assert "shakespeare: fetched" in result.stdout
    assert "interrupted: cifar10 is not complete" in result.stderr
    assert f"stormplus data cifar10 mnist --data-dir {tmp_path}" in result.stderr
    assert files_in(tmp_path) == ["tinyshakespeare/input.txt"]


def test_the_list_says_what_where_from_and_whether_it_is_there(server, tmp_path):
    small.write_mnist(tmp_path)
    small.write_shakespeare(tmp_path, b"short")
    result = run("--data-dir", tmp_path)
    assert result.exit_code == 0
    again = f"stormplus data cifar10 --data-dir {tmp_path}"
    assert f"cifar10: not there (fetch it with `{again}`)" in result.output
    assert "mnist: found\n" in result.output
    assert "shakespeare: broken: " in result.output
    for name, release in RELEASES.items():
        for text in (release.what, release.size, release.source, data.place(name, tmp_path)):
            assert text in result.output
    result = run()  # without a folder it says how to give one
    assert result.exit_code == 0
    assert result.output.count("no folder to look in (set STORMPLUS_DATA, or give --data-dir") == 3
    assert "$STORMPLUS_DATA/tinyshakespeare/input.txt" in result.output
    assert server.requests == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["mnist"], "set STORMPLUS_DATA, or give --data-dir DIR"), (["imagenet"], "'cifar10'")],
)
def test_wrong_usage_has_its_own_exit_code_and_the_help_teaches(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    text = run("--help").output
    for part in ("export STORMPLUS_DATA=", "stormplus data mnist", "Exit codes", *data.NAMES):
        assert part in text


def test_the_registry_names_official_sources_and_strong_enough_checksums():
    lengths = {"md5": 32, "sha256": 64}
    assert set(RELEASES) == set(data.NAMES)
    for release in RELEASES.values():
        for remote in release.remotes:
            algorithm, _, digest = remote.checksum.partition(":")
            assert len(digest) == lengths[algorithm]
            assert remote.url.startswith("https://")
            assert remote.url.endswith(remote.path.rpartition("/")[2])
