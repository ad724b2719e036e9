"""The journal: what is written is read, and what is damaged is named."""

import gzip
import json
import math

import numpy as np
import pytest
from tests.support.bench_rows import make_row, write_rows

from stormplus_bench import rows

HEADER = '{"format": "stormplus-rows", "version": 1}\n'
OTHER_VERSION = '{"format": "stormplus-rows", "version": 2}\n'


@pytest.fixture
def journal(tmp_path):
    """Two rows, seeds 0 and 1."""
    return write_rows(tmp_path / "rows.jsonl", [make_row([1]), make_row([2], seed=1)])


def test_a_row_comes_back_as_one_line_per_measurement(tmp_path):
    row = make_row([3, math.inf, 1e-20], method="Adam", lr=1e-3, seed=4, measured=2000)
    path = write_rows(tmp_path / "rows.jsonl", [row, make_row([], status="diverged")])
    assert path.read_text().startswith(HEADER)
    frame = rows.load(path)
    assert list(frame.columns) == list(rows.COLUMNS)
    assert list(frame["train_loss"].fillna(-1)) == [3, -1, 1e-20, -1]  # no measurement: one line
    assert list(frame["evaluations"]) == [0, 25, 50, 0]
    assert list(frame["method"]) == ["Adam"] * 3 + ["SGD"]
    assert (frame["seed"].dtype, frame["default"].dtype) == (np.int64, bool)
    assert list(frame["measured"].fillna(0)) == [2000] * 3 + [0]  # optional
    assert json.loads(frame["versions"][0])["torch"] == "2.13.0"


def test_a_later_row_replaces_an_earlier_one_also_of_another_file(tmp_path):
    one = write_rows(tmp_path / "1", [make_row([3, 2]), make_row([3, 2], seed=1), make_row([1])])
    two = write_rows(tmp_path / "2", [make_row([5], seed=1)])
    assert list(rows.load(one)["train_loss"]) == [1, 3, 2]
    assert list(rows.load(one, two)["train_loss"]) == [1, 5]


def test_a_journal_that_does_not_exist_or_is_empty_has_no_runs(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert rows.keys(path) == set()
    path.touch()
    assert rows.keys(path) == set()


@pytest.mark.parametrize("missing", [1, 40])  # bytes; 1 is the line break
def test_an_incomplete_last_line_is_skipped_and_removed_by_the_next_append(journal, missing):
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-missing])
    assert list(rows.load(journal)["train_loss"]) == [1]
    assert rows.keys(journal) == {("w", "SGD", 0.1, 0)}
    rows.append(journal, make_row([2], seed=1))  # the resumed benchmark
    assert journal.read_bytes() == whole


def changed(old, new):
    return HEADER + json.dumps(make_row([1])).replace(old, new, 1) + "\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\n", "line 1: expected .*, got b'hello'"),
        (OTHER_VERSION, "line 1: expected .*, got .*2"),
        (HEADER + "\udcff\udcfe\n" + "{}\n", "line 2 should be a row"),
        (changed('"seed"', '"sed"'), "line 2: the row has no seed"),
        (changed('"done"', '"odd"'), "'status' should be done or diverged"),
        (changed('"grad_norm": [1', '"grad_norm": [1, 2'), "lists of one length"),
    ],
)
def test_a_file_that_cannot_be_read_is_explained(tmp_path, text, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message) as caught:
        rows.load(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "{", OTHER_VERSION])
def test_append_refuses_a_file_of_another_kind_and_leaves_it(tmp_path, text):
    path = tmp_path / "other"
    path.write_text(text + "x")
    with pytest.raises(ValueError, match="line 1"):
        rows.append(path, make_row([1]))
    assert path.read_text() == text + "x"


def test_a_compressed_journal_is_read_and_a_damaged_one_explained(journal):
    packed = journal.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(journal.read_bytes()))
    assert rows.load(packed).equals(rows.load(journal))
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"rows\.jsonl\.gz cannot be decompressed"):
        rows.load(packed)
