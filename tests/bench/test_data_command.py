"""`stormplus data` against a server on this machine; nothing leaves it."""

import gzip
import hashlib
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace

import data_for_tests as small
import pytest
from click.testing import CliRunner
from data_server import Server, add, cifar10_archive

pytest.importorskip("pooch")

from stormplus.bench import data, download
from stormplus.bench.data import load
from stormplus.bench.data_command import data as command
from stormplus.bench.download import RELEASES


@pytest.fixture
def server(monkeypatch):
    """A server of small releases, which the registry is made to name."""
    small.make_small(monkeypatch)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.delenv(data.VARIABLE, raising=False)
    server = Server()
    server.content = {
        "cifar-10-binary.tar.gz": cifar10_archive(),
        "input.txt": small.SENTENCE,
        **small.mnist_files(),
    }
    for name, release in tuple(RELEASES.items()):
        remotes = tuple(local(remote, server) for remote in release.remotes)
        monkeypatch.setitem(RELEASES, name, replace(release, remotes=remotes))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


def local(remote, server):
    """The same file on the server here; the kind of checksum is kept."""
    algorithm = remote.checksum.partition(":")[0]
    name = remote.url.rpartition("/")[2]
    digest = hashlib.new(algorithm, server.content[name]).hexdigest()
    url = f"http://127.0.0.1:{server.server_port}/{name}"
    return replace(remote, url=url, checksum=f"{algorithm}:{digest}")


def run(*arguments):
    return CliRunner().invoke(command, [str(a) for a in arguments], prog_name="stormplus data")


def files_in(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_every_data_set_is_fetched_and_can_be_read(server, tmp_path):
    folder = tmp_path / "not there yet"
    result = run(*data.NAMES, "--folder", folder)
    assert result.exit_code == 0, result.output
    for name in data.NAMES:
        load(name, folder)
        assert f"{name}: fetched; use it with `export STORMPLUS_DATA='{folder}'`" in result.output
    # The archive, its readme and its strangers are gone, and nothing temporary is left.
    inside = "cifar10/cifar-10-batches-bin/"
    names = ["batches.meta.txt", *data.CIFAR10_TRAIN, data.CIFAR10_TEST]
    mnist = [f"mnist/{name}" for name in small.mnist_files()]
    assert files_in(folder) == sorted(
        [*(inside + name for name in names), *mnist, "tinyshakespeare/input.txt"]
    )
    assert files_in(tmp_path) == [f"{folder.name}/{file}" for file in files_in(folder)]
    assert (folder / "tinyshakespeare/input.txt").stat().st_mode & 0o044  # others may read it


def test_a_bar_shows_each_file(server, tmp_path):
    result = run("shakespeare", "--folder", tmp_path)
    assert "input.txt" in result.stderr
    assert f"{len(small.SENTENCE)}/{len(small.SENTENCE)} bytes" in result.stderr


def test_what_is_there_is_not_fetched_again(server, tmp_path):
    run(*data.NAMES, "--folder", tmp_path)
    server.requests.clear()
    result = run(*data.NAMES, "--folder", tmp_path)
    assert result.exit_code == 0
    assert server.requests == []
    assert f"mnist: already in {tmp_path}" in result.output


def test_only_the_missing_file_is_fetched(server, tmp_path):
    small.write_mnist(tmp_path)
    (tmp_path / "mnist/t10k-images-idx3-ubyte.gz").unlink()
    # A copy that somebody compressed again has another checksum, and the same images.
    again = tmp_path / "mnist/train-images-idx3-ubyte.gz"
    again.write_bytes(gzip.compress(gzip.decompress(again.read_bytes()), 1))
    assert again.read_bytes() != server.content[again.name]
    assert run("mnist", "--folder", tmp_path).exit_code == 0
    assert server.requests == ["t10k-images-idx3-ubyte.gz"]


def test_the_folder_is_the_environments(server, tmp_path, monkeypatch):
    monkeypatch.setenv(data.VARIABLE, str(tmp_path))
    assert run("shakespeare").exit_code == 0
    assert files_in(tmp_path) == ["tinyshakespeare/input.txt"]


@pytest.mark.parametrize("name", ["cifar10", "shakespeare"])  # md5 and sha256
def test_another_content_is_not_kept(server, tmp_path, name):
    server.spoil = dict.fromkeys(server.content, "other")
    result = run(name, "--folder", tmp_path)
    remote = RELEASES[name].remotes[0]
    assert result.exit_code == 1
    assert f"does not have the checksum {remote.checksum}, and was not kept" in result.stderr
    assert f"{remote.url}\n      as {tmp_path / remote.path}\n" in result.stderr
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("spoil", ["cut", "gone"])
def test_a_failed_download_leaves_nothing_and_can_be_repeated(server, tmp_path, spoil):
    server.spoil = {"cifar-10-binary.tar.gz": spoil}
    result = run("cifar10", "--folder", tmp_path)
    assert result.exit_code == 1
    assert f"cannot fetch {RELEASES['cifar10'].remotes[0].url}" in result.stderr
    assert files_in(tmp_path) == []
    server.spoil = {}
    assert run("cifar10", "--folder", tmp_path).exit_code == 0
    load("cifar10", tmp_path)


def test_the_files_before_a_failure_stay_and_the_others_are_still_tried(server, tmp_path):
    server.spoil = {"t10k-labels-idx1-ubyte.gz": "cut"}
    result = run("mnist", "shakespeare", "--folder", tmp_path)
    assert result.exit_code == 1
    assert "shakespeare: fetched" in result.output
    assert len(files_in(tmp_path / "mnist")) == 3
    assert result.stderr.count("\n      as ") == 1  # only the missing one is asked for
    server.spoil, server.requests = {}, []
    assert run("mnist", "--folder", tmp_path).exit_code == 0
    assert server.requests == ["t10k-labels-idx1-ubyte.gz"]


def test_offline_the_message_says_what_to_place_where(server, tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/cifar-10-binary.tar.gz"
        closed = replace(RELEASES["cifar10"].remotes[0], url=url)
        monkeypatch.setitem(RELEASES, "cifar10", replace(RELEASES["cifar10"], remotes=(closed,)))
        result = run("cifar10", "--folder", tmp_path)
    archive = tmp_path / "cifar-10-binary.tar.gz"
    assert result.exit_code == 1
    assert f"cannot fetch {url}" in result.stderr
    assert f"    {url}\n      as {archive}\nthen run `stormplus data cifar10" in result.stderr
    # Doing what it says helps, without a connection; the user's own file is left to the user.
    archive.write_bytes(server.content[archive.name])
    assert run("cifar10", "--folder", tmp_path).exit_code == 0
    load("cifar10", tmp_path)
    assert archive.exists()
    assert server.requests == []


def test_offline_every_missing_file_is_named_at_once(server, tmp_path):
    server.spoil = dict.fromkeys(server.content, "gone")
    result = run("mnist", "--folder", tmp_path)
    for remote in RELEASES["mnist"].remotes:
        assert f"    {remote.url}\n      as {tmp_path / remote.path}\n" in result.stderr


def test_a_wrong_archive_placed_by_hand_is_asked_for_again(server, tmp_path):
    archive = tmp_path / "cifar-10-binary.tar.gz"
    archive.write_bytes(b"half of it")
    server.spoil = {archive.name: "gone"}
    result = run("cifar10", "--folder", tmp_path)
    assert result.exit_code == 1
    assert f"      as {archive}\n" in result.stderr
    server.spoil = {}
    assert run("cifar10", "--folder", tmp_path).exit_code == 0


def test_without_pooch_the_message_says_what_to_install(server, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    result = run("mnist", "--folder", tmp_path)
    assert result.exit_code == 1
    assert "pip install 'stormplus[bench]'" in result.stderr
    assert run("--folder", tmp_path).exit_code == 0  # the list does not need it


def test_a_broken_file_is_named_and_never_overwritten(server, tmp_path):
    small.write_shakespeare(tmp_path, b"my own text")
    result = run("shakespeare", "--folder", tmp_path)
    assert result.exit_code == 1
    assert "input.txt is not the released file: 11 bytes" in result.stderr
    assert (tmp_path / "tinyshakespeare/input.txt").read_bytes() == b"my own text"


def test_a_folder_that_cannot_be_written_is_an_error_not_a_traceback(server, tmp_path):
    (tmp_path / "mnist").write_text("in the way")
    result = run("mnist", "--folder", tmp_path)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert str(tmp_path / "mnist") in result.stderr


def test_an_archive_without_a_file_is_refused(tmp_path):
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        add(tar, "cifar-10-batches-bin/test_batch.bin", b"x")
    with pytest.raises(ValueError, match=r"has no .*data_batch_1.bin"):
        download.unpack(archive, tmp_path / "release")
    archive.write_bytes(archive.read_bytes()[:-30])
    with pytest.raises(ValueError, match="cannot be unpacked"):
        download.unpack(archive, tmp_path / "release")


INTERRUPTIBLE = """
import sys
from dataclasses import replace
from stormplus.bench import data, data_command
folder, port, md5, data.SHAKESPEARE_BYTES = *sys.argv[1:4], int(sys.argv[4])
remotes = [
    replace(data_command.RELEASES["cifar10"].remotes[0], checksum=f"md5:{md5}",
            url=f"http://127.0.0.1:{port}/cifar-10-binary.tar.gz"),
    replace(data_command.RELEASES["shakespeare"].remotes[0],
            url=f"http://127.0.0.1:{port}/input.txt", checksum=f"sha256:{sys.argv[5]}"),
]
for name, remote in zip(("cifar10", "shakespeare"), remotes):
    data_command.RELEASES[name] = replace(data_command.RELEASES[name], remotes=(remote,))
data_command.data(["shakespeare", "cifar10", "mnist", "--folder", folder])
"""


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(server, tmp_path):
    server.spoil = {"cifar-10-binary.tar.gz": "stall"}
    md5 = hashlib.md5(server.content["cifar-10-binary.tar.gz"]).hexdigest()
    sha256 = hashlib.sha256(small.SENTENCE).hexdigest()
    arguments = [tmp_path, server.server_port, md5, len(small.SENTENCE), sha256]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_PROXY": "*"},
    )
    assert server.half_sent.wait(60)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "shakespeare: fetched" in output
    assert "interrupted: cifar10 is not complete" in errors
    assert f"stormplus data cifar10 mnist --folder {tmp_path}" in errors
    assert "Traceback" not in errors
    assert files_in(tmp_path) == ["tinyshakespeare/input.txt"]


def test_the_list_says_what_where_from_and_whether_it_is_there(server, tmp_path):
    small.write_mnist(tmp_path)
    small.write_shakespeare(tmp_path, b"short")
    result = run("--folder", tmp_path)
    assert result.exit_code == 0
    assert server.requests == []
    assert f"cifar10: not there (fetch it with `stormplus data cifar10 --folder {tmp_path}`)" in (
        result.output
    )
    assert "mnist: found\n" in result.output
    assert "shakespeare: broken: " in result.output
    for name, release in RELEASES.items():
        for text in (release.what, release.size, release.source, data.place(name, tmp_path)):
            assert text in result.output


def test_the_list_without_a_folder_says_how_to_give_one(server):
    result = run()
    assert result.exit_code == 0
    assert result.output.count("no folder to look in (set STORMPLUS_DATA, or give --folder") == 3
    assert "$STORMPLUS_DATA/tinyshakespeare/input.txt" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["mnist"], "set STORMPLUS_DATA, or give --folder DIR"), (["imagenet"], "'cifar10'")],
)
def test_wrong_usage_has_its_own_exit_code(server, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_help_teaches():
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
