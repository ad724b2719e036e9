"""The journal: what is written is read, and what is damaged is named."""

import gzip
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("pandas")

import bench_rows
from bench_rows import frame_of, make_run

from stormplus.bench import rows


def test_a_run_comes_back_as_one_line_a_point(tmp_path):
    frame = frame_of(tmp_path, [make_run([3, 2, 1], method="Adam", lr=1e-3, seed=4)])
    assert list(frame.columns) == list(rows.COLUMNS)
    assert list(frame["train_loss"]) == [3, 2, 1]
    assert list(frame["evaluations"]) == [0, 25, 50]
    assert set(frame["method"]) == {"Adam"}
    assert frame["seed"].dtype == np.int64
    assert frame["default"].dtype == bool
    assert frame["train_accuracy"].isna().all()
    assert json.loads(frame["versions"][0])["torch"] == "2.13.0"


def test_the_first_line_says_what_the_file_is(tmp_path):
    frame_of(tmp_path, [make_run([1])])
    first = (tmp_path / "rows.jsonl").read_text().splitlines()[0]
    assert json.loads(first) == {"format": "stormplus-rows", "version": 1}


def test_numbers_that_are_not_finite_become_null_and_extremes_survive(tmp_path):
    losses = [1e20, math.inf, math.nan, 1e-20, 0.0]
    frame = frame_of(tmp_path, [make_run(losses)])
    assert "NaN" not in (tmp_path / "rows.jsonl").read_text()
    assert list(frame["train_loss"].isna()) == [False, True, True, False, False]
    assert list(frame["train_loss"].dropna()) == [1e20, 1e-20, 0.0]


def test_a_later_run_replaces_an_earlier_one(tmp_path):
    runs = [make_run([3, 2]), make_run([3, 2], seed=1), make_run([3, 2, 1])]
    frame = frame_of(tmp_path, runs)
    assert list(frame[frame["seed"] == 0]["train_loss"]) == [3, 2, 1]
    assert len(frame) == 5


def test_later_files_replace_runs_of_earlier_ones(tmp_path):
    rows.append(tmp_path / "1", make_run([3, 2]))
    rows.append(tmp_path / "2", make_run([3, 1]))
    frame = rows.load_all([tmp_path / "1", tmp_path / "2"])
    assert list(frame["train_loss"]) == [3, 1]


def test_a_run_without_a_point_is_still_counted(tmp_path):
    frame = frame_of(tmp_path, [make_run([], status="diverged")])
    assert len(frame) == 1
    assert frame["evaluations"][0] == 0
    assert math.isnan(frame["train_loss"][0])


def test_keys_tell_what_need_not_be_run_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert rows.keys(path) == set()
    path.touch()
    assert rows.keys(path) == set()
    rows.append(path, make_run([1], lr=1))
    rows.append(path, make_run([1], seed=3))
    assert rows.keys(path) == {("w", "SGD", 1.0, 0), ("w", "SGD", 0.1, 3)}


def test_a_cut_last_line_is_named_dropped_and_mended(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows.append(path, make_run([1]))
    rows.append(path, make_run([2], seed=1))
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 3: the last line is cut short"):
        rows.load(path)
    assert list(rows.load(path, on_cut="drop")["train_loss"]) == [1]
    assert rows.keys(path) == {("w", "SGD", 0.1, 0)}
    rows.append(path, make_run([2], seed=1))  # the resumed benchmark
    assert path.read_bytes() == whole


@pytest.mark.parametrize("length", range(1, 44))
def test_a_cut_anywhere_in_the_first_lines_is_mended_by_append(tmp_path, length):
    path = tmp_path / "rows.jsonl"
    rows.append(path, make_run([1]))
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    rows.append(path, make_run([1]))
    assert path.read_bytes() == whole


def test_a_line_that_is_completed_while_the_file_is_read_is_still_cut(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    rows.append(path, make_run([1]))
    rows.append(path, make_run([2], seed=1))
    whole = path.read_bytes()
    for on_cut in ("raise", "drop"):
        reads = iter([whole[:-40], whole, whole])
        monkeypatch.setattr(type(path), "read_bytes", lambda _, reads=reads: next(reads))
        if on_cut == "drop":
            assert list(rows.load(path, on_cut)["train_loss"]) == [1]
        else:
            with pytest.raises(ValueError, match="line 3: the last line is cut short"):
                rows.load(path, on_cut)


def test_a_function_is_told_of_the_cut(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows.append(path, make_run([1]))
    with path.open("a") as file:
        file.write('{"workload')
    told = []
    assert len(rows.load(path, lambda *cut: told.append(cut))) == 1
    assert told == [(path, 3)]


def test_the_number_of_measured_examples_is_optional(tmp_path):
    frame = frame_of(tmp_path, [make_run([1], measured=2000), make_run([1], seed=1)])
    assert frame["measured"].to_list() == pytest.approx([2000, math.nan], nan_ok=True)
    for value in (2.5, True, 0, "all"):
        with pytest.raises(ValueError, match=f"'measured' should be a positive int, got {value!r}"):
            rows.append("never-written", make_run([1], measured=value))


def test_only_the_newline_is_missing(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows.append(path, make_run([1]))
    path.write_bytes(path.read_bytes()[:-1])
    assert len(rows.load(path)) == 1
    rows.append(path, make_run([2], seed=1))
    assert len(rows.load(path)) == 2


HEADER = rows.HEADER + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("workload,method\n", "line 1: not a journal of stormplus runs"),
        ("[1]\n", "line 1: not a journal"),
        ('{"format": "stormplus-rows", "version": 2}\n', "format version 2, this .* version 1"),
        (HEADER + "garbage\n" + json.dumps(make_run([1])) + "\n", "line 2 is not JSON"),
        (HEADER + "\udcff\n", "line 2 is not JSON"),
        (HEADER + "3\n", "line 2 should be a run"),
        (HEADER + json.dumps(make_run([1]) | {"lr": "fast"}) + "\n", "'lr' should be int or float"),
        (HEADER + json.dumps(make_run([1]) | {"lr": True}) + "\n", "'lr' should be int or float"),
        (HEADER + json.dumps(make_run([1]) | {"status": "ok"}) + "\n", "'status' should be one of"),
        (HEADER + json.dumps(make_run([1]) | {"curve": {}}) + "\n", "curve's 'evaluations'"),
    ],
)
def test_a_file_that_cannot_be_read_is_explained(tmp_path, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message) as caught:
        rows.load(path)
    assert str(path) in str(caught.value)


def test_parts_of_a_curve_have_one_length():
    run = make_run([1, 2])
    run["curve"]["grad_norm"] = [1]
    with pytest.raises(ValueError, match="one length"):
        rows.append("never-written", run)


def test_append_refuses_a_file_of_another_kind_and_leaves_it(tmp_path):
    for text in ("a,b\n1,2\n", '{"format": "stormplus-rows", "version": 2}\n'):
        path = tmp_path / "other"
        path.write_text(text)
        with pytest.raises(ValueError, match="line 1"):
            rows.append(path, make_run([1]))
        assert path.read_text() == text


def test_on_cut_is_checked(tmp_path):
    with pytest.raises(ValueError, match="'raise' or 'drop', got 'keep'"):
        rows.load(tmp_path / "x", on_cut="keep")


WRITER = """
import sys
from bench_rows import make_run
from stormplus.bench import rows
for seed in range(int(sys.argv[2]), int(sys.argv[2]) + 15):
    rows.append(sys.argv[1], make_run([1.0] * 2000, seed=seed))
"""


def test_two_processes_append_to_one_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    support = Path(bench_rows.__file__).parent
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), start],
            env=os.environ | {"PYTHONPATH": str(support)},
        )
        for start in ("0", "15")
    ]
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    assert {seed for *_, seed in rows.keys(path)} == set(range(30))
    assert path.read_text().count("stormplus-rows") == 1


def as_benchopt(frame: pd.DataFrame) -> pd.DataFrame:
    names = {name: f"objective_{name}" for name in rows.COLUMNS}
    names |= {"train_loss": "objective_value", "seconds": "time"}
    new = frame.drop(columns=["versions", "machine"]).rename(columns=names)
    return new.assign(
        dataset_name=frame["workload"],
        solver_name=frame["method"] + "[lr=...]",
        objective_name="Training",
        platform="linux",
        **{"version-numpy": "2.4.6"},
    )


def test_the_frame_of_benchopt_becomes_the_same_frame(tmp_path):
    frame = frame_of(tmp_path, [make_run([3, None, 1], seed=s, measured=9) for s in (0, 1)])
    same = rows.from_benchopt(as_benchopt(frame).sample(frac=1, random_state=0))
    measured = [name for name in rows.COLUMNS if name not in ("versions", "machine")]
    pd.testing.assert_frame_equal(same[measured], frame[measured])
    assert json.loads(same["versions"][0]) == {"numpy": "2.4.6"}
    assert set(same["machine"]) == {"linux"}
    without = rows.from_benchopt(as_benchopt(frame).drop(columns="objective_measured"))
    assert without["measured"].isna().all()


def test_a_frame_of_another_benchmark_is_refused(tmp_path):
    frame = as_benchopt(frame_of(tmp_path, [make_run([1])])).drop(columns="objective_lr")
    with pytest.raises(ValueError, match="no column objective_lr"):
        rows.from_benchopt(frame)


def test_a_compressed_journal_is_read_and_a_damaged_one_explained(tmp_path):
    plain = tmp_path / "rows.jsonl"
    rows.append(plain, make_run([3, 2, 1]))
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert rows.load(packed).equals(rows.load(plain))
    assert rows.keys(packed) == rows.keys(plain)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz cannot be decompressed"):
        rows.load(packed)
