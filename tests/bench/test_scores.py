"""Finals, scores and profiles, against values derived by hand from `bench_rows.hand_made`."""

import math

import numpy as np
import pandas as pd
import pytest
from bench_rows import frame_of, hand_made, make_row, swept

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


def test_a_table_is_computed_once_for_a_frame_and_nobody_can_spoil_it(frame):
    calls = []
    counted = finals.once(lambda part, name: calls.append(name) or part.copy())
    first = counted(frame, "a")
    first["loss"] = 0
    assert "loss" not in counted(frame, "a")
    counted(frame, "b")
    counted(frame[frame["seed"] == 0], "a")
    assert calls == ["a", "b", "a"]


def test_a_minority_that_diverges_does_not_decide():
    found = [make_row([4, 2], seed=0), make_row([4, 3], seed=1)]
    frame = frame_of([*found, make_row([4], seed=2, status="diverged")])
    assert finals.per_rate(frame)["loss"].item() == 3  # median(2, 3, inf)


def test_a_run_that_diverged_has_no_final_values():
    found = [make_row([4, 2]), make_row([4, 3, None], seed=1, status="diverged")]
    found += [make_row([4, 3, None], method="Adam")]  # diverged, whatever it says
    for row in found:
        row["curve"]["valid_accuracy"] = [0.5] * len(row["curve"]["train_loss"])
    frame = frame_of(found)
    ends = finals.per_run(frame).set_index(["method", "seed"])
    assert ends["loss"].to_list() == [2, INF, INF]
    for name, value in (("valid_loss", 2), ("valid_accuracy", 0.5)):
        assert ends[name].to_list() == pytest.approx([value, math.nan, math.nan], nan_ok=True)
    # Half of SGD's runs diverged, so that its median did.
    assert finals.per_rate(frame)["valid_loss"].isna().all()


def test_the_best_tuned_method_of_each_workload(frame):
    table = finals.best_tuned(frame)
    # a: SGD at lr 1 ends at 0 and 1; b: SGD ends at 0.5, the median of Adam is inf.
    assert table[["method", "lr", "loss"]].to_numpy().tolist() == [
        ["SGD", 1.0, 0.5],
        ["SGD", 0.1, 0.5],
    ]


def test_equal_losses_prefer_the_default_lr_and_two_defaults_are_an_error():
    found = [make_row([2, 1], lr=lr, default=lr == 0.1) for lr in (0.01, 0.1, 1.0)]
    assert finals.tuned(frame_of(found))["lr"].item() == 0.1
    with pytest.raises(ValueError, match=r"SGD has 2 default learning rates on w: 0\.1, 1"):
        finals.defaults(frame_of([make_row([2, 1], lr=lr) for lr in (0.1, 1.0)]))


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
    marked = {"low": True, "middle": False, "high": True, "one": False, "none": False}
    assert table["at_end"].to_dict() == marked
    assert table["rates"].to_dict() == {"low": 3, "middle": 3, "high": 3, "one": 1, "none": 2}


def test_cost_of_not_tuning(frame):
    table, columns = scores.cost_of_not_tuning(frame), ["lost", "ratio"]
    # a: from 10 to 0.5, so 9.5 are possible; STORM+ ends at 2, SGD at 4 by default.
    expected = {"STORM+": [1.5 / 9.5, 4], "SGD": [3.5 / 9.5, 8], "Adam": [INF, INF]}
    for method, values in expected.items():
        assert lookup(table, columns, workload="a", method=method) == pytest.approx(values)
    # b: from 2 to 0.5, so 1.5 are possible; STORM+ ends at 1; SGD is the best.
    assert lookup(table, columns, workload="b", method="STORM+") == pytest.approx([0.5 / 1.5, 2])
    assert lookup(table, columns, workload="b", method="SGD") == [0, 1]
    mean = scores.mean_lost(table)
    assert list(mean.index) == ["SGD", "STORM+", "Adam"]
    # Divergence counts as no decrease at all.
    assert list(mean["mean"]) == pytest.approx([3.5 / 19, (1.5 / 9.5 + 0.5 / 1.5) / 2, 1])
    assert list(mean["place"]) == [1, 2, 3]


def test_a_method_that_did_not_run_every_workload_has_no_place():
    found = [make_row([4, 0], method="SVRG", workload="a")]
    for workload in "abc":
        ends = {"Adam": 2, "SGD": 1} if workload != "c" else {"Adam": 9, "SGD": 9}  # c: n/a
        found += [make_row([4, e], method=m, workload=workload) for m, e in ends.items()]
    mean = scores.mean_lost(scores.cost_of_not_tuning(frame_of(found)))
    # SVRG has lost nothing, on the one workload that it ran of the two with a decrease.
    # Adam: a: 2 / 4, b: (2 - 1) / 3. SGD: a: 1 / 4, b: 0.
    assert list(mean.index) == ["SGD", "Adam", "SVRG"]
    assert list(mean["mean"]) == pytest.approx([1 / 8, 5 / 12, 0])
    assert list(mean["place"]) == pytest.approx([1, 2, math.nan], nan_ok=True)
    assert list(mean["note"]) == ["", "", " (1 of 2 workloads)"]


def test_a_best_loss_of_zero_has_a_ratio_and_without_a_decrease_nothing_is_lost():
    found = [make_row([4, 0]), make_row([4, 1], method="Adam"), make_row([4, 0], method="STORM+")]
    cost = scores.cost_of_not_tuning(frame_of(found)).set_index("method")
    assert cost["ratio"].to_dict() == {"SGD": 1, "STORM+": 1, "Adam": INF}
    assert cost["lost"].to_dict() == {"SGD": 0, "STORM+": 0, "Adam": 0.25}
    assert math.isnan(scores.cost_of_not_tuning(frame_of([make_row([1, 2])]))["lost"].item())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(0, "0"), (1e-9, "<0.1"), (0.0123, "1.2"), (0.0999, "10"), (1, "100"), (1e20, ">999")],
        *[(math.nan, "n/a"), (INF, "div.")],
    ],
)
def test_per_cent(value, text):
    assert scores.per_cent(value) == text


def test_wins_ties_and_losses(frame):
    duels = scores.wins_ties_losses(frame, "STORM+")
    # a: 1..3 against 4..4; b: 1 against 0.5; Adam's medians are inf.
    assert lookup(duels, "outcome", workload="a", rival="SGD") == "win"
    assert lookup(duels, "outcome", workload="b", rival="SGD") == "loss"
    assert lookup(duels, "outcome", workload="b", rival="Adam") == "win"
    assert scores.count(duels).loc["SGD"].to_dict() == {"win": 1, "tie": 0, "loss": 1}
    with pytest.raises(ValueError, match=r"no run of 'Lion' at its default lr .* Adam, SGD"):
        scores.wins_ties_losses(frame, "Lion")


def test_at_the_best_lr_methods_with_one_lr_are_left_out(frame):
    # On a Adam ran one lr, on b every method did.
    # a: 1..3 against 0..1: one seed of each ends at 1, so nobody wins.
    duels = scores.wins_ties_losses(frame, "STORM+", best_lr=True)
    assert duels[["workload", "rival", "outcome"]].to_numpy().tolist() == [["a", "SGD", "tie"]]
    assert list(scores.against_the_best(frame, "STORM+", best_lr=True)["workload"]) == ["a"]
    nothing = scores.wins_ties_losses(frame, "Adam", best_lr=True)
    assert nothing.empty
    assert scores.count(nothing).empty
    assert len(scores.wins_ties_losses(frame_of(swept()), "STORM+", best_lr=True)) == 4
    # The best that tuning can do is still that of all runs.
    assert list(finals.best_tuned(frame)["loss"]) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("ours", "theirs", "outcome"),
    [
        ([0.0], [1.0], "win"),
        ([1.0], [0.0], "loss"),
        ([0.0], [0.09], "tie"),  # the margin is 1 % of 10 - 0
        ([0.0], [0.11], "win"),
        ([0.0, 4.0], [3.0, 9.0], "tie"),  # overlap
        ([0.0, 2.9], [3.0, 9.0], "win"),
        ([INF, 1.0], [5.0, 5.0], "loss"),  # half diverged
        ([INF, 1.0, 1.0], [5.0, 5.0, 5.0], "tie"),  # the median is 1, but a seed is above all
        ([INF], [INF], "tie"),
        ([1e-20], [1e20], "win"),
    ],
)
def test_what_counts_as_a_win(ours, theirs, outcome):
    found = [
        make_row([10, e], method=m, seed=s, status="diverged" if e == INF else "done")
        for m, ends in (("STORM+", ours), ("Adam", theirs))
        for s, e in enumerate(ends)
    ]
    assert scores.wins_ties_losses(frame_of(found), "STORM+")["outcome"].item() == outcome


def test_against_the_best_leaves_our_own_methods_out():
    ends = {"STORM+": 3, "SGD": 5, "Adam": 4, "STORM+ mean": 0, "Untuned": 0}
    frame = frame_of([make_row([9, end], method=m) for m, end in ends.items()])
    best = scores.against_the_best(frame, "STORM+")
    assert best[["rival", "outcome"]].to_numpy().tolist() == [["Adam", "win"]]


def test_the_table_has_a_line_for_each_workload_and_method(frame):
    table = scores.table(frame)
    assert len(table) == 6
    # Default: lr 0.1, 4. Tuned: lr 1, 0.5. 4 runs. Adam, the one classic, is never below the
    # start: so everyone has reached the target from the first evaluation on.
    columns = ["lr", "loss", "tuned_lr", "tuned_loss", "time", "runs", "runs_diverged"]
    line = lookup(table, columns, workload="a", method="SGD")
    assert line == [0.1, 4, 1, 0.5, 1, 4, 0]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        *(([5], [5]), ([], []), ([1, 0], [1, 0]), ([1, 3], [1, 2]), ([1], [1])),
        *(([1e20, 0], [1e20, 1e-20]), ([None, None], [None, None]), ([2, 1], None)),
    ],
    ids=["diverged", "no curve", "zero", "worse", "short", "extremes", "nothing", "alone"],
)
def test_odd_rows_have_scores_too(ours, theirs, request):
    status = "diverged" if "diverged" in request.node.name or not ours else "done"
    found = [make_row(ours, method="STORM+", status=status)]
    found += [make_row(theirs, status=status)] if theirs is not None else []
    frame = frame_of(found)
    assert not (scores.cost_of_not_tuning(frame)["lost"] < 0).any()
    assert profiles.performance_profile(frame).scores.between(0, 1).all()
    assert set(scores.wins_ties_losses(frame, "STORM+")["outcome"]) <= {"win", "tie", "loss"}
    assert len(scores.table(frame)) == len(found)


def test_curves_are_medians_and_diverged_runs_stay_infinite(frame):
    table = profiles.curves(frame)
    adam = table[(table["workload"] == "b") & (table["method"] == "Adam")]
    # Seed 0: 2 1.5 1 0.6 0.5; seed 1: 2 9 and then nothing. Median of 1.5 and 9 is 5.25.
    assert list(adam["median"]) == [2, 5.25, INF, INF, INF]
    assert list(adam["low"]) == [2, 1.5, 1, 0.6, 0.5]


def test_curves_of_seeds_measured_elsewhere_are_interpolated():
    found = [
        make_row([4, 0], seed=0, evaluations=[0, 100]),
        make_row([4, 4, 4], seed=1, evaluations=[0, 25, 100]),
    ]
    # Seed 0 at 25 is 3 on the line from 4 to 0; the median with 4 is 3.5.
    assert list(profiles.curves(frame_of(found))["median"]) == [4, 3.5, 2]


def test_targets_are_what_the_best_classic_reaches_in_time(frame):
    # Up to 75: a: SGD at lr 1 has 1, STORM+ 2. b: SGD 0.5.
    assert profiles.targets(frame, 0.75, setters=()).to_dict() == {"a": 1, "b": 0.5}
    # Up to 50: a: SGD at lr 1 has 2.
    assert profiles.targets(frame, 0.5, setters=()).to_dict() == {"a": 2, "b": 0.5}
    found = [
        make_row([9, 5, 4, 3, 2], method="Adam"),
        make_row([9, 6, 3, 3, 1], method="Adam", lr=1.0),  # the better one in time: 3
        make_row([9, 1, 1, 1, 1], method="STORM+"),  # better still, but no classic
        make_row([9, 1, 1, 1, 1], method="STORM+", workload="other"),
    ]
    # Measured at 0, 25, 50, 75, 100; 0.7 of the budget takes in the first three. Where no
    # classic was run, whoever was sets the target.
    assert profiles.targets(frame_of(found)).to_dict() == {"other": 1, "w": 3}


def test_performance_profile_at_the_defaults(frame):
    profile = profiles.performance_profile(frame, fraction=0.5, setters=())
    # a: target 2; STORM+ is there at 75 with both seeds, SGD at lr 0.1 never.
    # b: target 0.5; SGD at 50; Adam's seed 0 at 100, seed 1 never: the median is inf.
    assert profile.times.loc["STORM+"].to_list() == [75, INF]
    assert profile.times.loc["SGD"].to_list() == [INF, 50]
    assert profile.times.loc["Adam"].to_list() == [INF, INF]
    # Each of the two is the fastest on one of two workloads: half of the area.
    assert profile.scores.to_dict() == {"SGD": 0.5, "STORM+": 0.5, "Adam": 0}


def test_performance_profile_at_the_best_lr():
    profile = profiles.performance_profile(
        frame_of(swept()), best_lr=True, fraction=0.5, setters=()
    )
    # a: SGD at lr 1 reaches 2 at 50, STORM+ at 75: r = 1.5.
    assert profile.ratios.loc["STORM+"].to_list() == [1.5, INF]
    assert profile.ratios.loc["SGD"].to_list() == [1, 1]
    assert profile.rho.loc["STORM+"].to_dict() == {1.0: 0, 1.5: 0.5, 4.0: 0.5}
    # Half of [1.5, 4] out of [1, 4]; the staircase's area on a fine grid is the same.
    assert profile.scores["STORM+"] == pytest.approx(0.5 * 2.5 / 3)
    taus = np.linspace(1, 4, 30_001)
    area = np.mean((profile.ratios.loc["STORM+"].to_numpy()[:, None] <= taus).mean(axis=0))
    assert profile.scores["STORM+"] == pytest.approx(area, abs=1e-4)
    assert profile.scores["SGD"] == 1


def test_at_the_best_lr_who_ran_one_lr_is_left_out_of_the_profile(frame):
    # On a Adam ran one lr; on b every method did, so that nobody can be compared there.
    profile = profiles.performance_profile(frame, best_lr=True, fraction=0.5, setters=())
    assert profile.times["a"].to_dict() == {"SGD": 50, "STORM+": 75}
    assert list(profile.times) == list(profile.target.index) == ["a"]
    # One lr on one workload is no missed target; one lr each leaves nobody.
    rates = {"default": False, "workload": "a"}
    found = [make_row([2, 1], lr=lr, workload=w) for lr in (1, 2) for w in "ab"]
    found += [make_row([2, 1], lr=lr, method="Adam", workload="b") for lr in (1, 2)]
    found += [make_row([2, 1], lr=1, method="Adam", **rates)]
    profile = profiles.performance_profile(
        frame_of(row | {"default": False} for row in found), best_lr=True
    )
    assert list(profile.scores.index) == ["SGD"]
    assert profiles.performance_profile(frame_of([make_row([2, 1])]), best_lr=True).scores.empty


def test_times_are_compared_at_the_checkpoint():
    found = [
        make_row([4, 1, 0], evaluations=[0, 4, 8]),
        make_row([4, 1, 0], evaluations=[0, 3, 7], method="STORM+"),  # 1 + 2 + ... gradients
        make_row([4, 0, 0], evaluations=[0, 5, 9], method="SVRG"),
        make_row([4, 9], evaluations=[0, 6], method="Adam", status="diverged"),
        make_row([4, 1, 1, 0], evaluations=[0, 3, 4, 8], workload="dense"),
        make_row([4, 1, 1, 0], evaluations=[0, 4, 5, 8], workload="dense", method="DoG"),
    ]
    times = profiles.time_to_target(frame_of(found), pd.Series({"w": 1.0, "dense": 1.0}))
    times = times.set_index(["workload", "method"])["time"]
    # 4 is the checkpoint of 3, and so not one before 5. At 6 there is but a divergence.
    assert times["w"].to_dict() == {"SGD": 4, "STORM+": 4, "SVRG": 5, "Adam": INF}
    # Measured at 3 and at 4, and at 4 and at 5, by one run: these are different checkpoints.
    assert times["dense"].to_dict() == {"SGD": 3, "DoG": 4}


@pytest.mark.parametrize(
    ("found", "times"),
    [
        # A workload without a run is missed.
        ([make_row([2, 1]), make_row([2, 1], workload="x", method="Adam")], {"w": (INF, 25)}),
        # A run that diverges has not reached the target.
        ([make_row([4, 3, 2, 1, 1]), make_row([4, 1], method="Adam", status="diverged")],
         {"w": (INF, 75)}),
        # A target that is met at the start takes one evaluation.
        ([make_row([1, 2]), make_row([1, 1], method="Adam")], {"w": (1, 1)}),
    ],
)  # fmt: skip
def test_times_of_odd_runs(found, times):
    profile = profiles.performance_profile(frame_of(found), fraction=0.75, setters=())
    for workload, (adam, sgd) in times.items():
        assert profile.times[workload].to_dict() == {"Adam": adam, "SGD": sgd}
