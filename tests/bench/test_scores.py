"""Scores, against values derived by hand from `bench_rows.hand_made`."""

import math

import pytest

pytest.importorskip("pandas")

from bench_rows import frame_of, hand_made, make_run, swept

from stormplus.bench import scores

INF = math.inf


@pytest.fixture
def frame(tmp_path):
    return frame_of(tmp_path, hand_made())


def lookup(table, column, **where):
    for name, value in where.items():
        table = table[table[name] == value]
    assert len(table) == 1
    return table[column].item()


def test_final_is_the_median_over_seeds_with_its_spread(frame):
    table = scores.final(frame)
    ours = {"workload": "a", "method": "STORM+", "lr": 1.0}
    # Seeds end at 1 and 3.
    assert [lookup(table, name, **ours) for name in ("loss", "low", "high")] == [2, 1, 3]
    assert lookup(table, "seeds", **ours) == 2
    assert lookup(table, "diverged", **ours) == 0
    # One of Adam's two runs on b diverged: half of the runs is too many.
    adam = {"workload": "b", "method": "Adam"}
    assert [lookup(table, name, **adam) for name in ("loss", "low", "high")] == [INF, 0.5, INF]
    assert lookup(table, "diverged", **adam) == 1
    assert lookup(table, "grad_norm", **adam) == INF


def test_a_minority_that_diverges_does_not_decide(tmp_path):
    runs = [make_run([4, 2], seed=0), make_run([4, 3], seed=1)]
    frame = frame_of(tmp_path, [*runs, make_run([4], seed=2, status="diverged")])
    # median(2, 3, inf)
    assert scores.final(frame)["loss"].item() == 3


def test_a_last_loss_that_is_not_finite_is_inf_even_if_the_run_says_done(tmp_path):
    frame = frame_of(tmp_path, [make_run([4, 2, None])])
    assert scores.final(frame)["loss"].item() == INF


def test_the_best_tuned_method_of_each_workload(frame):
    table = scores.best_tuned(frame)
    # a: SGD at lr 1 ends at 0 and 1; b: SGD ends at 0.5, the median of Adam is inf.
    assert list(table["method"]) == ["SGD", "SGD"]
    assert list(table["lr"]) == [1.0, 0.1]
    assert list(table["loss"]) == [0.5, 0.5]


def test_equal_losses_prefer_the_default_lr(tmp_path):
    runs = [make_run([2, 1], lr=lr, default=lr == 0.1) for lr in (0.01, 0.1, 1.0)]
    assert scores.tuned(frame_of(tmp_path, runs))["lr"].item() == 0.1


def test_two_default_learning_rates_are_an_error(tmp_path):
    frame = frame_of(tmp_path, [make_run([2, 1], lr=lr) for lr in (0.1, 1.0)])
    with pytest.raises(ValueError, match=r"SGD has 2 default learning rates on w: 0\.1, 1"):
        scores.defaults(frame)


def test_cost_of_not_tuning(frame):
    table = scores.cost_of_not_tuning(frame)
    # a: from 10 to 0.5, so 9.5 are possible; STORM+ ends at 2, SGD at 4 by default.
    assert lookup(table, "lost", workload="a", method="STORM+") == pytest.approx(1.5 / 9.5)
    assert lookup(table, "lost", workload="a", method="SGD") == pytest.approx(3.5 / 9.5)
    assert lookup(table, "lost", workload="a", method="Adam") == INF
    assert lookup(table, "ratio", workload="a", method="STORM+") == 4
    # b: from 2 to 0.5, so 1.5 are possible; STORM+ ends at 1; SGD is the best.
    assert lookup(table, "lost", workload="b", method="STORM+") == pytest.approx(0.5 / 1.5)
    assert lookup(table, "lost", workload="b", method="SGD") == 0
    assert lookup(table, "ratio", workload="b", method="SGD") == 1
    mean = scores.mean_lost(table)
    assert list(mean.index) == ["SGD", "STORM+", "Adam"]
    assert mean["mean"]["STORM+"] == pytest.approx((1.5 / 9.5 + 0.5 / 1.5) / 2)
    assert mean["mean"]["Adam"] == 1  # divergence counts as no decrease at all
    assert list(mean["place"]) == [1, 2, 3]


def test_a_method_that_did_not_run_every_workload_has_no_place(tmp_path):
    runs = [make_run([4, 0], method="SVRG", workload="a")]
    for workload in "abc":
        ends = {"Adam": 2, "SGD": 1} if workload != "c" else {"Adam": 9, "SGD": 9}  # c: n/a
        runs += [make_run([4, e], method=m, workload=workload) for m, e in ends.items()]
    mean = scores.mean_lost(scores.cost_of_not_tuning(frame_of(tmp_path, runs)))
    # SVRG has lost nothing, on the one workload that it ran of the two with a decrease.
    # Adam: a: 2 / 4, b: (2 - 1) / 3. SGD: a: 1 / 4, b: 0.
    assert list(mean.index) == ["SGD", "Adam", "SVRG"]
    assert list(mean["mean"]) == pytest.approx([1 / 8, 5 / 12, 0])
    assert list(mean["place"]) == pytest.approx([1, 2, math.nan], nan_ok=True)
    assert list(mean["note"]) == ["", "", " (1 of 2 workloads)"]


def test_wins_ties_and_losses(frame):
    duels = scores.wins_ties_losses(frame, "STORM+")
    # a: 1..3 against 4..4; b: 1 against 0.5; Adam's medians are inf.
    assert lookup(duels, "outcome", workload="a", rival="SGD") == "win"
    assert lookup(duels, "outcome", workload="b", rival="SGD") == "loss"
    assert lookup(duels, "outcome", workload="b", rival="Adam") == "win"
    counts = scores.count(duels)
    assert counts.loc["SGD"].to_dict() == {"win": 1, "tie": 0, "loss": 1}


def test_at_the_best_lr_methods_with_one_lr_are_left_out(frame, tmp_path):
    # On a Adam ran one lr, on b every method did.
    # a: 1..3 against 0..1: one seed of each ends at 1, so nobody wins.
    duels = scores.wins_ties_losses(frame, "STORM+", best_lr=True)
    assert duels[["workload", "rival", "outcome"]].to_numpy().tolist() == [["a", "SGD", "tie"]]
    best = scores.against_the_best(frame, "STORM+", best_lr=True)
    assert list(best["workload"]) == ["a"]
    assert scores.wins_ties_losses(frame, "Adam", best_lr=True).empty
    assert scores.count(scores.wins_ties_losses(frame, "Adam", best_lr=True)).empty
    (tmp_path / "all").mkdir()
    everyone = frame_of(tmp_path / "all", swept())
    assert len(scores.wins_ties_losses(everyone, "STORM+", best_lr=True)) == 4
    # The best that tuning can do is still that of all runs.
    assert list(scores.best_tuned(frame)["loss"]) == [0.5, 0.5]


def test_a_best_lr_at_an_end_of_its_range_is_marked(tmp_path):
    ends = {"low": (1, 2, 3), "middle": (2, 1, 3), "high": (3, 2, 1)}
    runs = [
        make_run([4, end], method=method, lr=lr, default=lr == 0.1)
        for method, values in ends.items()
        for lr, end in zip((0.01, 0.1, 1.0), values)
    ]
    runs += [make_run([4, 1], method="one")]
    runs += [make_run([4], method="none", lr=lr, status="diverged", default=False) for lr in (1, 2)]
    table = scores.tuned(frame_of(tmp_path, runs)).set_index("method")
    marked = {"low": True, "middle": False, "high": True, "one": False, "none": False}
    assert table["at_end"].to_dict() == marked
    assert table["rates"].to_dict() == {"low": 3, "middle": 3, "high": 3, "one": 1, "none": 2}


def test_a_diverged_run_has_no_final_quality(tmp_path):
    runs = [make_run([4, 2]), make_run([4, 3, None], seed=1, status="diverged")]
    runs += [make_run([4, 3, None], method="Adam")]  # diverged, whatever it says
    for run in runs:
        run["curve"]["valid_accuracy"] = [0.5] * len(run["curve"]["train_loss"])
    frame = frame_of(tmp_path, runs)
    ends = scores.runs(frame).set_index(["method", "seed"])
    for name, value in (("valid_loss", 2), ("valid_accuracy", 0.5)):
        assert ends[name]["SGD", 0] == value
        assert math.isnan(ends[name]["SGD", 1])
        assert math.isnan(ends[name]["Adam", 0])
    # Half of SGD's runs diverged, so that its median did.
    assert scores.final(frame)["valid_loss"].isna().all()


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
def test_what_counts_as_a_win(tmp_path, ours, theirs, outcome):
    runs = []
    for method, ends in (("STORM+", ours), ("Adam", theirs)):
        for seed, end in enumerate(ends):
            status = "diverged" if end == INF else "done"
            runs.append(make_run([10, end], method=method, seed=seed, status=status))
    frame = frame_of(tmp_path, runs)
    assert scores.wins_ties_losses(frame, "STORM+")["outcome"].item() == outcome


def test_a_method_that_is_not_there_is_named(frame):
    with pytest.raises(ValueError, match=r"no run of 'Lion' at its default lr .* Adam, SGD"):
        scores.wins_ties_losses(frame, "Lion")


def test_against_the_best_leaves_our_own_methods_out(tmp_path):
    runs = [make_run([9, end], method=m) for m, end in (("STORM+", 3), ("SGD", 5), ("Adam", 4))]
    frame = frame_of(tmp_path, [*runs, make_run([9, 0], method="STORM+ mean")])
    best = scores.against_the_best(frame, "STORM+")
    assert best[["rival", "outcome"]].to_numpy().tolist() == [["Adam", "win"]]


def test_the_table_has_a_line_for_each_workload_and_method(frame):
    table = scores.table(frame)
    assert len(table) == 6
    line = table[(table["workload"] == "a") & (table["method"] == "SGD")].iloc[0]
    # Default: lr 0.1, 4. Tuned: lr 1, 0.5. 4 runs. Adam, the one classic, is never below the
    # start: so everyone has reached the target from the first evaluation on.
    assert [line["lr"], line["loss"], line["tuned_lr"], line["tuned_loss"]] == [0.1, 4, 1, 0.5]
    assert [line["time"], line["runs"], line["runs_diverged"]] == [1, 4, 0]


@pytest.mark.parametrize(
    "runs",
    [
        [make_run([5], status="diverged"), make_run([5], method="STORM+", status="diverged")],
        [make_run([], status="diverged"), make_run([], method="STORM+", status="diverged")],
        [make_run([1, 0]), make_run([1, 0], method="STORM+")],
        [make_run([1, 2]), make_run([1, 3], method="STORM+")],
        [make_run([1]), make_run([1], method="STORM+")],
        [make_run([1e20, 1e-20]), make_run([1e20, 0], method="STORM+")],
        [make_run([None, None]), make_run([None, None], method="STORM+")],
        [make_run([2, 1], method="STORM+")],
    ],
    ids=["diverged", "no point", "zero", "worse", "one point", "extremes", "nothing", "alone"],
)
def test_odd_rows_have_scores_too(tmp_path, runs):
    frame = frame_of(tmp_path, runs)
    cost = scores.cost_of_not_tuning(frame)
    assert not (cost["lost"] < 0).any()
    profile = scores.performance_profile(frame)
    assert profile.scores.between(0, 1).all()
    assert set(scores.wins_ties_losses(frame, "STORM+")["outcome"]) <= {"win", "tie", "loss"}
    assert len(scores.table(frame)) == len(runs)


def test_a_best_loss_of_zero_has_a_ratio(tmp_path):
    runs = [make_run([4, 0]), make_run([4, 1], method="Adam"), make_run([4, 0], method="STORM+")]
    cost = scores.cost_of_not_tuning(frame_of(tmp_path, runs)).set_index("method")
    assert cost["ratio"].to_dict() == {"SGD": 1, "STORM+": 1, "Adam": INF}
    assert cost["lost"].to_dict() == {"SGD": 0, "STORM+": 0, "Adam": 0.25}


def test_nobody_ends_below_the_start(tmp_path):
    cost = scores.cost_of_not_tuning(frame_of(tmp_path, [make_run([1, 2])]))
    assert math.isnan(cost["lost"].item())  # no decrease was possible, so none can be lost
