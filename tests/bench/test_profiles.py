"""Curves, targets and profiles, against values derived by hand from `bench_rows.hand_made`."""

import math

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("pandas")

from bench_rows import frame_of, hand_made, make_run, swept

from stormplus.bench import scores

INF = math.inf


@pytest.fixture
def frame(tmp_path):
    return frame_of(tmp_path, hand_made())


def test_curves_are_medians_and_diverged_runs_stay_infinite(frame):
    table = scores.curves(frame)
    adam = table[(table["workload"] == "b") & (table["method"] == "Adam")]
    # Seed 0: 2 1.5 1 0.6 0.5; seed 1: 2 9 and then nothing. Median of 1.5 and 9 is 5.25.
    assert list(adam["median"]) == [2, 5.25, INF, INF, INF]
    assert list(adam["low"]) == [2, 1.5, 1, 0.6, 0.5]


def test_curves_of_seeds_measured_at_other_points_are_interpolated(tmp_path):
    runs = [
        make_run([4, 0], seed=0, evaluations=[0, 100]),
        make_run([4, 4, 4], seed=1, evaluations=[0, 25, 100]),
    ]
    table = scores.curves(frame_of(tmp_path, runs))
    # Seed 0 at 25 is 3 on the line from 4 to 0; the median with 4 is 3.5.
    assert list(table["median"]) == [4, 3.5, 2]


def test_targets_are_what_the_best_reaches_in_time(frame):
    # Up to 75: a: SGD at lr 1 has 1, STORM+ 2. b: SGD 0.5.
    assert scores.targets(frame, 0.75, setters=()).to_dict() == {"a": 1, "b": 0.5}
    # Up to 50: a: SGD at lr 1 has 2.
    assert scores.targets(frame, 0.5, setters=()).to_dict() == {"a": 2, "b": 0.5}


def test_the_classics_set_the_targets(tmp_path):
    runs = [
        make_run([9, 5, 4, 3, 2], method="Adam"),
        make_run([9, 6, 3, 3, 1], method="Adam", lr=1.0),  # the better one in time: 3
        make_run([9, 1, 1, 1, 1], method="STORM+"),  # better still, but no classic
        make_run([9, 1, 1, 1, 1], method="STORM+", workload="other"),
    ]
    # Measured at 0, 25, 50, 75, 100; 0.7 of the budget takes in the first three. Where no
    # classic was run, whoever was sets the target.
    assert scores.targets(frame_of(tmp_path, runs)).to_dict() == {"other": 1, "w": 3}


def test_performance_profile_at_the_defaults(frame):
    profile = scores.performance_profile(frame, fraction=0.5, setters=())
    # a: target 2; STORM+ is there at 75 with both seeds, SGD at lr 0.1 never.
    # b: target 0.5; SGD at 50; Adam's seed 0 at 100, seed 1 never: the median is inf.
    assert profile.times.loc["STORM+"].to_list() == [75, INF]
    assert profile.times.loc["SGD"].to_list() == [INF, 50]
    assert profile.times.loc["Adam"].to_list() == [INF, INF]
    # Each of the two is the fastest on one of two workloads: half of the area.
    assert profile.scores.to_dict() == {"SGD": 0.5, "STORM+": 0.5, "Adam": 0}


def test_performance_profile_at_the_best_lr(tmp_path):
    frame = frame_of(tmp_path, swept())
    profile = scores.performance_profile(frame, best_lr=True, fraction=0.5, setters=())
    # a: SGD at lr 1 reaches 2 at 50, STORM+ at 75: r = 1.5.
    assert profile.ratios.loc["STORM+"].to_list() == [1.5, INF]
    assert profile.ratios.loc["SGD"].to_list() == [1, 1]
    assert profile.rho.loc["STORM+"].to_dict() == {1.0: 0, 1.5: 0.5, 4.0: 0.5}
    # Half of [1.5, 4] out of [1, 4].
    assert profile.scores["STORM+"] == pytest.approx(0.5 * 2.5 / 3)
    assert profile.scores["SGD"] == 1
    # The staircase's area by quadrature on a fine grid is the same.
    taus = np.linspace(1, 4, 30_001)
    r = profile.ratios.loc["STORM+"].to_numpy()
    area = np.mean((r[:, None] <= taus).mean(axis=0))
    assert profile.scores["STORM+"] == pytest.approx(area, abs=1e-4)


def test_at_the_best_lr_who_ran_one_lr_is_left_out(frame):
    # On a Adam ran one lr; on b every method did, so that nobody can be compared there.
    profile = scores.performance_profile(frame, best_lr=True, fraction=0.5, setters=())
    assert profile.times["a"].to_dict() == {"SGD": 50, "STORM+": 75}
    assert list(profile.times) == list(profile.target.index) == ["a"]
    assert profile.scores["SGD"] == 1


def test_one_lr_on_one_workload_is_no_missed_target(tmp_path):
    runs = [make_run([2, 1], lr=lr, workload=w, default=False) for lr in (1, 2) for w in "ab"]
    runs += [make_run([2, 1], lr=lr, method="Adam", default=False) for lr in (1, 2)]
    runs += [make_run([2, 1], lr=1, method="Adam", workload="a", default=False)]
    profile = scores.performance_profile(frame_of(tmp_path, runs), best_lr=True)
    assert list(profile.scores.index) == ["SGD"]


def test_one_lr_each_leaves_nobody(tmp_path):
    profile = scores.performance_profile(frame_of(tmp_path, [make_run([2, 1])]), best_lr=True)
    assert profile.scores.empty


def test_times_are_compared_at_the_checkpoint(tmp_path):
    runs = [
        make_run([4, 1, 0], evaluations=[0, 4, 8]),
        make_run([4, 1, 0], evaluations=[0, 3, 7], method="STORM+"),  # 1 + 2 + ... gradients
        make_run([4, 0, 0], evaluations=[0, 5, 9], method="SVRG"),
        make_run([4, 9], evaluations=[0, 6], method="Adam", status="diverged"),
        make_run([4, 1, 1, 0], evaluations=[0, 3, 4, 8], workload="dense"),
        make_run([4, 1, 1, 0], evaluations=[0, 4, 5, 8], workload="dense", method="DoG"),
    ]
    goal = pd.Series({"w": 1.0, "dense": 1.0})
    times = scores.time_to_target(frame_of(tmp_path, runs), goal)
    times = times.set_index(["workload", "method"])["time"]
    # 4 is the checkpoint of 3, and so not one before 5. At 6 there is but a divergence.
    assert times["w"].to_dict() == {"SGD": 4, "STORM+": 4, "SVRG": 5, "Adam": INF}
    # Measured at 3 and at 4, and at 4 and at 5, by one run: these are different checkpoints.
    assert times["dense"].to_dict() == {"SGD": 3, "DoG": 4}


def test_a_workload_without_a_run_is_missed(tmp_path):
    runs = [make_run([2, 1], workload=w) for w in ("a", "b")]
    frame = frame_of(tmp_path, [*runs, make_run([2, 1], workload="a", method="Adam")])
    profile = scores.performance_profile(frame)
    assert profile.times.loc["Adam"].to_list() == [25, INF]
    assert profile.scores.to_dict() == {"SGD": 1, "Adam": 0.5}


def test_a_run_that_diverges_has_not_reached_the_target(tmp_path):
    runs = [make_run([4, 3, 2, 1, 1]), make_run([4, 1], method="Adam", status="diverged")]
    profile = scores.performance_profile(frame_of(tmp_path, runs), fraction=0.75, setters=())
    assert profile.times["w"].to_dict() == {"Adam": INF, "SGD": 75}


def test_a_target_met_before_the_start_is_one_evaluation(tmp_path):
    frame = frame_of(tmp_path, [make_run([1, 2]), make_run([1, 1], method="Adam")])
    profile = scores.performance_profile(frame)
    assert profile.times["w"].to_dict() == {"Adam": 1, "SGD": 1}
