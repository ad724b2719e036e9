"""The journal: what is written is read, and what is damaged is named."""

import gzip
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import bench_rows
import numpy as np
import pandas as pd
import pytest
from bench_rows import frame_of, make_row, write_rows

from stormplus_bench import rows

HEADER = '{"format": "stormplus-rows", "version": 1}\n'


@pytest.fixture
def journal(tmp_path):
    """Two rows, seeds 0 and 1."""
    return write_rows(tmp_path / "rows.jsonl", [make_row([1]), make_row([2], seed=1)])


def test_a_row_comes_back_as_one_line_a_measurement(tmp_path):
    row = make_row([3, 2, 1], method="Adam", lr=1e-3, seed=4, measured=2000)
    path = write_rows(tmp_path / "rows.jsonl", [row, make_row([1])])
    assert path.read_text().startswith(HEADER)
    frame = rows.load(path)
    assert list(frame.columns) == list(rows.COLUMNS)
    assert list(frame["train_loss"]) == [3, 2, 1, 1]
    assert list(frame["evaluations"]) == [0, 25, 50, 0]
    assert list(frame["method"]) == ["Adam"] * 3 + ["SGD"]
    assert (frame["seed"].dtype, frame["default"].dtype) == (np.int64, bool)
    assert frame["train_accuracy"].isna().all()
    assert list(frame["measured"].fillna(0)) == [2000] * 3 + [0]  # optional
    assert json.loads(frame["versions"][0])["torch"] == "2.13.0"


def test_numbers_that_are_not_finite_become_null_and_extremes_survive(tmp_path):
    path = write_rows(tmp_path / "r", [make_row([1e20, math.inf, math.nan, 1e-20, 0.0])])
    assert "NaN" not in path.read_text()
    losses = rows.load(path)["train_loss"]
    assert list(losses.isna()) == [False, True, True, False, False]
    assert list(losses.dropna()) == [1e20, 1e-20, 0.0]


def test_a_later_row_replaces_an_earlier_one_also_of_another_file(tmp_path):
    one = write_rows(tmp_path / "1", [make_row([3, 2]), make_row([3, 2], seed=1), make_row([1])])
    assert list(rows.load(one)["train_loss"]) == [1, 3, 2]
    two = write_rows(tmp_path / "2", [make_row([5], seed=1)])
    assert list(rows.load_all([one, two])["train_loss"]) == [1, 5]


def test_a_run_without_a_measurement_is_still_counted():
    frame = frame_of([make_row([], status="diverged")])
    assert frame["evaluations"].to_list() == [0]
    assert math.isnan(frame["train_loss"][0])


def test_keys_tell_what_need_not_be_run_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert rows.keys(path) == set()
    path.touch()
    assert rows.keys(path) == set()
    write_rows(path, [make_row([1], lr=1), make_row([1], seed=3)])
    assert rows.keys(path) == {("w", "SGD", 1.0, 0), ("w", "SGD", 0.1, 3)}


def test_a_cut_last_line_is_named_dropped_and_mended(journal):
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-40])
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 3: the last line is cut short"):
        rows.load(journal)
    assert list(rows.load(journal, on_cut="drop")["train_loss"]) == [1]
    told = []
    assert len(rows.load(journal, lambda *cut: told.append(cut))) == 1
    assert told == [(journal, 3)]
    assert rows.keys(journal) == {("w", "SGD", 0.1, 0)}
    rows.append(journal, make_row([2], seed=1))  # the resumed benchmark
    assert journal.read_bytes() == whole
    journal.write_bytes(whole[:-1])  # only the end of the line is missing
    rows.append(journal, make_row([3], seed=2))
    assert list(rows.load(journal)["train_loss"]) == [1, 2, 3]
    with pytest.raises(ValueError, match="'raise' or 'drop', got 'keep'"):
        rows.load(journal, on_cut="keep")


def test_a_cut_anywhere_in_the_first_lines_is_mended_by_append(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [make_row([1])])
    whole = path.read_bytes()
    for length in range(1, len(HEADER) + 2):
        path.write_bytes(whole[:length])
        rows.append(path, make_row([1]))
        assert path.read_bytes() == whole


@pytest.mark.parametrize("on_cut", ["raise", "drop"])
def test_a_line_that_is_completed_while_the_file_is_read_is_still_cut(journal, monkeypatch, on_cut):
    whole = journal.read_bytes()
    reads = iter([whole[:-40], whole, whole])
    monkeypatch.setattr(type(journal), "read_bytes", lambda _: next(reads))
    if on_cut == "drop":
        assert list(rows.load(journal, on_cut)["train_loss"]) == [1]
    else:
        with pytest.raises(ValueError, match="line 3: the last line is cut short"):
            rows.load(journal, on_cut)


def line(**fields):
    return HEADER + json.dumps(make_row([1], **fields)) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("hello\n", "line 1: not a journal"),
        ('{"format": "other"}\n', "line 1: not a journal"),
        ('{"format": "stormplus-rows", "version": 2}\n', "format version 2, this stormplus"),
        (HEADER + "{\n" + "{}\n", "line 2 is not JSON"),
        (HEADER + "\udcff\udcfe\n" + "{}\n", "line 2 is not JSON"),
        (HEADER + "[1]\n", r"line 2 should be a row \(a JSON object\), got '\[1\]'"),
        (HEADER + "{}\n", "line 2: 'workload' should be str, got None"),
        (line(lr="0.1"), "'lr' should be int or float, got '0.1'"),
        (line(lr=math.inf), "'lr' should be finite"),
        (line(seed=True), "'seed' should be int, got True"),
        (line(default=1), "'default' should be bool, got 1"),
        (line(status="odd"), "'status' should be one of"),
        (line(measured=0), "'measured' should be a positive int, got 0"),
        (line(measured=2.5), "'measured' should be a positive int, got 2.5"),
        (line(curve={}), "curve's 'evaluations'"),
    ],
)
def test_a_file_that_cannot_be_read_is_explained(tmp_path, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message) as caught:
        rows.load(path)
    assert str(path) in str(caught.value)


def replaced(old, new):
    return HEADER + json.dumps(make_row([1])).replace(old, new, 1) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + "[" * 10**5 + "]" * 10**5 + "\n", "line 2 is not JSON"),
        ("[" * 10**5 + "]" * 10**5 + "\n", "line 1: not a journal"),
        (replaced('"lr": 0.1', f'"lr": {"9" * 400}'), "'lr' should be finite, got 99999"),
        (replaced('"lr": 0.1', '"lr": NaN'), "'lr' should be finite, got nan"),
        (replaced('"budget": 100', f'"budget": {"9" * 400}'), "'budget' should be finite"),
        (replaced('"workload": "w"', r'"workload": "a\ud800"'), "'workload' should be a text of"),
        (
            replaced('"method": "SGD"', r'"method": "a\u0000\nb"'),
            "'method' should be a text of one",
        ),
        (replaced('"method": "SGD"', '"method": ""'), "'method' should be a text of one line"),
        (replaced('"seed": 0', f'"seed": {"9" * 400}'), "'seed' is too large, got 99999"),
        (replaced('"state_mb": 0.5', '"state_mb": "x"'), "'state_mb' should be a number"),
        (replaced('"train_loss": [1', f'"train_loss": [{"9" * 400}'), "list of numbers and nulls"),
        (replaced('"evaluations": [0.0', '"evaluations": [null'), "'evaluations' should all be"),
        (replaced('"versions": {', '"versions": [1], "other": {'), "'versions' should be"),
    ],
    ids=[
        *("nested", "header", "lr", "nan", "budget", "surrogate", "control", "empty"),
        *("seed", "text", "curve", "no evaluations", "versions"),
    ],
)
def test_nothing_that_a_file_says_is_a_traceback(tmp_path, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as told:
        rows.load(path)
    assert len(str(told.value)) < 400
    with pytest.raises(ValueError, match=message):
        rows.keys(path)


def test_a_full_disk_names_the_journal(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", lambda handle, data: len(data) // 2)
    with pytest.raises(OSError, match=r"is it full.*rows\.jsonl"):
        rows.append(tmp_path / "rows.jsonl", make_row([1]))


def test_the_parts_of_a_curve_have_one_length():
    row = make_row([1, 2])
    row["curve"]["grad_norm"] = [1]
    with pytest.raises(ValueError, match="one length"):
        rows.append("never-written", row)


@pytest.mark.parametrize("text", ["a,b\n1,2\n", '{"format": "stormplus-rows", "version": 2}\n'])
def test_append_refuses_a_file_of_another_kind_and_leaves_it(tmp_path, text):
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(ValueError, match="line 1"):
        rows.append(path, make_row([1]))
    assert path.read_text() == text


WRITER = """
import sys
from bench_rows import make_row
from stormplus_bench import rows
for seed in range(int(sys.argv[2]), int(sys.argv[2]) + 15):
    rows.append(sys.argv[1], make_row([1.0] * 2000, seed=seed))
"""


def test_two_processes_append_to_one_file(tmp_path):
    path, support = tmp_path / "rows.jsonl", Path(bench_rows.__file__).parent
    search = os.pathsep.join([str(support), os.environ.get("PYTHONPATH", "")])
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), start],
            env=os.environ | {"PYTHONPATH": search},
        )
        for start in ("0", "15")
    ]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    assert {seed for *_, seed in rows.keys(path)} == set(range(30))
    assert path.read_text().count("stormplus-rows") == 1


def as_benchopt(frame):
    names = {name: f"objective_{name}" for name in rows.COLUMNS}
    names |= {"train_loss": "objective_value", "seconds": "time"}
    new = frame.drop(columns=["versions", "machine"]).rename(columns=names)
    return new.assign(platform="linux", **{"version-numpy": "2.4.6"})


def test_the_frame_of_benchopt_becomes_the_same_frame():
    frame = frame_of([make_row([3, None, 1], seed=s, measured=9) for s in (0, 1)])
    same = rows.from_benchopt(as_benchopt(frame).sample(frac=1, random_state=0))
    measured = [name for name in rows.COLUMNS if name not in ("versions", "machine")]
    pd.testing.assert_frame_equal(same[measured], frame[measured])
    assert json.loads(same["versions"][0]) == {"numpy": "2.4.6"}
    assert set(same["machine"]) == {"linux"}
    without = rows.from_benchopt(as_benchopt(frame).drop(columns="objective_measured"))
    assert without["measured"].isna().all()
    with pytest.raises(ValueError, match="no column objective_lr"):  # another benchmark's
        rows.from_benchopt(as_benchopt(frame).drop(columns="objective_lr"))


def test_a_compressed_journal_is_read_and_a_damaged_one_explained(journal):
    packed = journal.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(journal.read_bytes()))
    assert rows.load(packed).equals(rows.load(journal))
    assert rows.keys(packed) == rows.keys(journal)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz cannot be decompressed"):
        rows.load(packed)
