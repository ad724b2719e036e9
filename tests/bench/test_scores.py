"""Finals, scores and profiles, against values derived by hand from `bench_rows.hand_made`."""

import math

import pandas as pd
import pytest
from tests.support.bench_rows import frame_of, hand_made, make_row

from stormplus_bench import finals, profiles, scores

INF = math.inf


@pytest.fixture(scope="module")
def frame():
    return frame_of(hand_made())


def lookup(table, columns, **where):
    for name, value in where.items():
        table = table[table[name] == value]
    assert len(table) == 1
    return table[columns].iloc[0].to_list() if isinstance(columns, list) else table[columns].item()


def test_finals_are_medians_over_seeds_with_their_spread(frame):
    table, columns = finals.per_rate(frame), ["loss", "low", "high", "seeds", "diverged"]
    # Seeds end at 1 and 3.
    assert lookup(table, columns, workload="a", method="STORM+", lr=1.0) == [2, 1, 3, 2, 0]
    # One of Adam's two runs on b diverged: half of the runs is too many.
    assert lookup(table, columns, workload="b", method="Adam") == [INF, 0.5, INF, 2, 1]
    assert lookup(table, "grad_norm", workload="b", method="Adam") == INF
    # A minority that diverges does not decide.
    found = [make_row([4, 2], seed=0), make_row([4, 3], seed=1)]
    frame = frame_of([*found, make_row([4], seed=2, status="diverged")])
    assert finals.per_rate(frame)["loss"].item() == 3  # median(2, 3, inf)


def test_a_run_that_diverged_has_no_final_values():
    found = [make_row([4, 2]), make_row([4, 3, None], seed=1, status="diverged")]
    found += [make_row([4, 3, None], method="Adam")]  # done, but its last loss is not finite
    for row in found:
        row["curve"]["valid_accuracy"] = [0.5] * len(row["curve"]["train_loss"])
    frame = frame_of(found)
    ends = finals.per_run(frame).set_index(["method", "seed"])
    assert ends["loss"].to_list() == [2, INF, INF]
    for name, value in (("valid_loss", 2), ("valid_accuracy", 0.5)):
        assert ends[name].to_list() == pytest.approx([value, math.nan, math.nan], nan_ok=True)
    assert finals.per_rate(frame)["valid_loss"].isna().all()  # half of SGD's runs diverged


def test_equal_losses_prefer_the_default_lr():
    found = [make_row([2, 1], lr=lr, default=lr == 0.1) for lr in (0.01, 0.1, 1.0)]
    assert finals.tuned(frame_of(found))["lr"].item() == 0.1


def test_a_best_lr_at_an_end_of_its_range_is_marked():
    ends = {"low": (1, 2, 3), "middle": (2, 1, 3), "high": (3, 2, 1)}
    found = [
        make_row([4, end], method=method, lr=lr, default=lr == 0.1)
        for method, values in ends.items()
        for lr, end in zip((0.01, 0.1, 1.0), values)
    ]
    found += [make_row([4, 1], method="one")]
    found += [make_row([4], method="none", lr=lr, status="diverged") for lr in (1, 2)]
    table = finals.tuned(frame_of(found)).set_index("method")
    assert set(table.index[table["at_end"]]) == {"low", "high"}
    assert table["rates"].to_dict() == {"low": 3, "middle": 3, "high": 3, "one": 1, "none": 2}


def test_gap_at_defaults(frame):
    # a: from 10 to 0.5 (SGD at lr 1), so 9.5 are achievable; STORM+ ends at 2, SGD at 4 by default.
    # b: from 2 to 0.5, so 1.5 are achievable; STORM+ ends at 1; SGD is the best.
    table = scores.gap(frame)
    grid = table.pivot(index="method", columns="workload", values="gap")
    assert grid.loc["STORM+"].to_list() == pytest.approx([1.5 / 9.5, 0.5 / 1.5])
    assert grid.loc["SGD"].to_list() == pytest.approx([3.5 / 9.5, 0])
    assert grid.loc["Adam"].to_list() == [INF, INF]
    mean = scores.mean_gap(table)  # divergence counts as no reduction at all
    assert mean["mean"].to_dict() == pytest.approx(
        {"SGD": 3.5 / 19, "STORM+": (1.5 / 9.5 + 0.5 / 1.5) / 2, "Adam": 1}
    )
    assert mean["rank"].to_dict() == {"SGD": 1, "STORM+": 2, "Adam": 3}
    tuned = scores.gap(frame, finals.tuned(frame))
    assert lookup(tuned, "gap", workload="a", method="SGD") == 0
    # No run ends below the initial loss: there is nothing to reduce.
    assert math.isnan(scores.gap(frame_of([make_row([1, 2])]))["gap"].item())


def test_a_method_that_did_not_run_every_workload_has_no_rank():
    found = [make_row([4, 0], method="SVRG", workload="a")]
    for workload in "abc":
        ends = {"Adam": 2, "SGD": 1} if workload != "c" else {"Adam": 9, "SGD": 9}  # c: no gap
        found += [make_row([4, e], method=m, workload=workload) for m, e in ends.items()]
    mean = scores.mean_gap(scores.gap(frame_of(found)))
    # Adam: a: 2 / 4, b: (2 - 1) / 3. SGD: a: 1 / 4, b: 0.
    assert mean["mean"].to_dict() == pytest.approx({"SGD": 1 / 8, "Adam": 5 / 12, "SVRG": 0})
    assert list(mean["rank"]) == pytest.approx([1, 2, math.nan], nan_ok=True)
    assert list(mean["workloads"]) == [2, 2, 1]


def test_results_have_a_line_for_each_workload_and_method(frame):
    table = scores.results(frame)
    assert len(table) == 6
    # Adam, the one classic, is never below the start, so the target is met at once.
    columns = ["lr", "loss", "gap", "tuned_lr", "tuned_loss", "time", "runs", "diverged"]
    line = lookup(table, columns, workload="a", method="SGD")
    assert line == pytest.approx([0.1, 4, 350 / 9.5, 1, 0.5, 1, 4, 0])


def test_curves_are_medians_and_diverged_runs_stay_infinite(frame):
    table = profiles.curves(frame)
    adam = table[(table["workload"] == "b") & (table["method"] == "Adam")]
    # Seed 0: 2 1.5 1 0.6 0.5; seed 1: 2 9 and then nothing. Median of 1.5 and 9 is 5.25.
    assert list(adam["median"]) == [2, 5.25, INF, INF, INF]
    assert list(adam["low"]) == [2, 1.5, 1, 0.6, 0.5]


def test_targets_are_what_the_best_classic_reaches_in_time():
    found = [
        make_row([9, 5, 4, 3, 2], method="Adam"),
        make_row([9, 6, 3, 3, 1], method="Adam", lr=1.0),  # the better one in time: 3
        make_row([9, 1, 1, 1, 1], method="STORM+"),  # better still, but no classic
        make_row([9, 1, 1, 1, 1], method="STORM+", workload="other"),
    ]
    # 0.7 of the budget includes the measurements at 0, 25 and 50.
    assert profiles.targets(frame_of(found)).to_dict() == {"other": 1, "w": 3}


def test_performance_profile_at_the_defaults(frame, monkeypatch):
    """With targets that any method reaches in half of the budget."""
    monkeypatch.setattr(profiles, "CLASSICS", ())
    monkeypatch.setattr(profiles, "TARGET_AT", 0.5)
    profile = profiles.performance_profile(frame)
    # a: target 2; STORM+ is there at 75 with both seeds, SGD at lr 0.1 never.
    # b: target 0.5; SGD at 50; Adam's seed 0 at 100, seed 1 never: the median is inf.
    assert profile.times.loc["STORM+"].to_list() == [75, INF]
    assert profile.times.loc["SGD"].to_list() == [INF, 50]
    # Each of the two is the fastest on one of two workloads: half of the area.
    assert profile.rho.loc["STORM+"].to_dict() == {1.0: 0.5, 4.0: 0.5}
    assert profile.scores.to_dict() == {"SGD": 0.5, "STORM+": 0.5, "Adam": 0}


def test_the_profile_score_is_the_area_under_the_profile():
    # Adam reaches the target, 1, at 50, SGD at 75: r = 1.5.
    found = [make_row([9, 5, 1, 1], method="Adam"), make_row([9, 9, 9, 1])]
    profile = profiles.performance_profile(frame_of(found))
    assert profile.rho.loc["SGD"].to_dict() == {1.0: 0, 1.5: 1, 4.0: 1}
    # The staircase from 1.5 to 4, of 1 to 4.
    assert profile.scores.to_dict() == pytest.approx({"Adam": 1, "SGD": 2.5 / 3})


def test_times_of_paired_methods_are_those_of_the_next_checkpoint():
    found = [
        make_row([4, 1, 0], evaluations=[0, 4, 8]),
        make_row([4, 1, 0], evaluations=[0, 3, 7], method="STORM+"),  # 1 + 2 + ... gradients
        make_row([4, 0, 0], evaluations=[0, 5, 9], method="SVRG"),
        make_row([4, 1], evaluations=[0, 6], method="Adam", status="diverged"),
        make_row([0, 0], evaluations=[0, 8], method="DoG"),  # there from the start
    ]
    times = profiles.time_to_target(frame_of(found), pd.Series({"w": 1.0}))
    expected = {"SGD": 4, "STORM+": 4, "SVRG": 5, "Adam": INF, "DoG": 1}
    assert times.set_index("method")["time"].to_dict() == expected
