"""Both evaluations of a sample: the same random numbers, and statistics that move once."""

import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

from stormplus import StormPlus, pair_lock, same_sample, verify_closure
from tests.torch.optimizers import assert_same, halves

X = torch.randn(12, 16, 6, generator=torch.Generator().manual_seed(0))
ways = pytest.mark.parametrize("way", ["closure", "context", "halves"])


class Drift(nn.Module):
    """A user's own statistics: a buffer that is replaced, one that is None, one expanded."""

    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.zeros(()))
        self.register_buffer("seen", None)
        self.register_buffer("shift", torch.ones(()).expand(8))

    def forward(self, x):
        if self.training:
            self.level = 0.9 * self.level + 0.1 * x.detach().mean()
            self.seen = torch.ones(()) if self.seen is None else self.seen + 1
        return x + self.shift


def network(momentum=0.1):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=momentum), nn.Tanh(), nn.Dropout(0.3),
        Drift(), nn.Linear(8, 1),
    )  # fmt: skip


def backward(model, opt, x, factor=1.0):
    opt.zero_grad()
    loss = torch.log1p(model(x).square()).mean()
    (factor * loss).backward()
    return loss


def take(model, opt, evaluate, way):
    if way == "closure":
        opt.step(same_sample(opt, model)(evaluate))
        return
    with same_sample(opt, model):
        opt.step(evaluate) if way == "context" else halves(opt, evaluate)


def train(model, way, samples=X):
    opt = StormPlus(model.parameters(), lr=0.3)
    for i, x in enumerate(samples):
        torch.manual_seed(i)
        take(model, opt, lambda: backward(model, opt, x), way)
    return opt


def by_hand(model, samples=X):
    """Train so that the statistics see each sample once, at x_{t+1}."""
    opt = StormPlus(model.parameters(), lr=0.3, replay_rng=False)
    for i, x in enumerate(samples):
        if opt.started:
            twin = copy.deepcopy(model)  # its statistics are thrown away
            torch.manual_seed(i)
            torch.log1p(twin(x).square()).mean().backward()
            for p, q in zip(model.parameters(), twin.parameters()):
                p.grad = q.grad
            opt.move()
        torch.manual_seed(i)
        backward(model, opt, x)
        opt.estimate()


# -- statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, None])
@ways
def test_statistics_and_weights_equal_the_run_by_hand(way, momentum):
    model, expected = network(momentum), network(momentum)
    mean = model[1].running_mean
    train(model, way)
    by_hand(expected)
    assert model[1].num_batches_tracked == model[4].seen == len(X)
    assert model[1].running_mean is mean  # the same objects
    assert_same(dict(model.state_dict()), dict(expected.state_dict()))
    assert model.training


@ways
@pytest.mark.parametrize("at", [0, 2])  # the very first sample, and one with two evaluations
@pytest.mark.parametrize("error", [ZeroDivisionError, FloatingPointError])
def test_a_first_evaluation_that_fails_is_not_seen_by_the_statistics(way, at, error):
    model = network()
    opt = train(model, way, X[:at])
    before = copy.deepcopy(dict(model.named_buffers()))

    def fail():
        backward(model, opt, X[at], float("nan"))
        if error is ZeroDivisionError:
            raise error

    with pytest.raises(error):
        take(model, opt, fail, way)
    assert_same(dict(model.named_buffers()), before)
    assert opt.started == (at > 0)  # only this sample is lost
    take(model, opt, lambda: backward(model, opt, X[at]), way)
    assert model[1].num_batches_tracked == at + 1
    opt.step(lambda: backward(model, opt, X[at + 1]))  # and nothing is left behind
    assert model[1].num_batches_tracked == at + 3


@pytest.mark.parametrize("way", ["closure", "same context", "new context"])
def test_a_second_evaluation_tried_again_is_the_same_sample(way):
    # Statistics and masks are those of one clean evaluation.
    model, expected = network(), network()
    opt, calls = train(model, "closure", X[:3]), []
    train(expected, "closure", X[:4])
    torch.manual_seed(3)

    def evaluate():
        calls.append(None)
        return backward(model, opt, X[3], float("inf") if len(calls) == 2 else 1.0)

    def complete():
        evaluate()
        opt.estimate()

    if way == "same context":
        with same_sample(opt, model):
            with pytest.raises(FloatingPointError):
                halves(opt, evaluate)
            complete()
    else:
        with pytest.raises(FloatingPointError):
            take(model, opt, evaluate, way)
        torch.rand(5)  # the stream goes on elsewhere meanwhile
        with same_sample(opt, model):
            complete()
    torch.testing.assert_close(
        dict(model.state_dict()), dict(expected.state_dict()), rtol=1e-5, atol=1e-6
    )


# -- random numbers ------------------------------------------------------------------------------


def draw(generator=None):
    """Return two random numbers, with time for another thread in between."""
    first = torch.rand(1, generator=generator).item()
    time.sleep(0.0005)
    return first, torch.rand(1, generator=generator).item()


class Dropper:
    """Records the random numbers of each evaluation, and raises in that of number `fail_at`."""

    def __init__(self, fail_at=None, generator=None, **options):
        self.p = nn.Parameter(torch.ones(2))
        self.opt = StormPlus([self.p], **options)
        self.drawn, self.fail_at, self.generator = [], fail_at, generator

    def __call__(self):
        self.opt.zero_grad()
        self.drawn.append(draw(self.generator))
        if len(self.drawn) == self.fail_at:
            raise ZeroDivisionError
        loss = (self.p * self.p).sum()
        loss.backward()
        return loss

    def take(self, steps, way="step"):
        for _ in range(steps):
            if way == "step":
                self.opt.step(self)
            else:
                with same_sample(self.opt):
                    halves(self.opt, self)
        return self

    def pairs(self):
        return list(zip(self.drawn[1::2], self.drawn[2::2], strict=True))

    def lose_a_pair(self):
        self.fail_at = 3
        with pytest.raises(ZeroDivisionError):
            self.take(2)
        assert self.opt.pending
        return self


EITHER_WAY = ["step", "halves"]


@pytest.mark.parametrize("replay", [True, False, []], ids=str)
@pytest.mark.parametrize("way", EITHER_WAY)
def test_the_stream_is_replayed_and_goes_on_from_the_second_evaluation(replay, way):
    torch.manual_seed(0)
    found = [*Dropper(replay_rng=replay).take(2, way).drawn, draw()]
    torch.manual_seed(0)
    a, b, c, d = (draw() for _ in range(4))
    assert found == ([a, b, c, d] if replay is False else [a, b, b, c])


@pytest.mark.parametrize("copied", [False, True])
def test_generators_of_the_users_own_are_replayed(copied):
    generator = torch.Generator().manual_seed(5)
    run = Dropper(generator=generator, replay_rng=[generator])
    if copied:  # a copy replays the user's generator, not a copy of it
        run.p, run.opt = copy.deepcopy((run.p, run.opt))
    run.take(3)
    generator.manual_seed(5)
    a, b, c = (draw(generator) for _ in range(3))
    assert run.drawn == [a, b, b, c, c]


@pytest.mark.parametrize("own", [False, True])  # a generator of the user's, or torch's stream
def test_a_pending_pair_is_completed_with_its_own_random_numbers(own):
    stream = torch.Generator() if own else torch.default_generator
    options = {"generator": stream, "replay_rng": [stream] if own else True}
    run = Dropper(**options).lose_a_pair()
    stream.manual_seed(99)
    with same_sample(run.opt):
        run()
        run.opt.estimate()
    assert run.drawn[-1] == run.drawn[1]


def test_a_pair_that_was_begun_outside_is_not_rewound():
    run = Dropper().take(2)
    run()
    run.opt.move()
    before = torch.get_rng_state()
    with same_sample(run.opt):
        assert torch.equal(torch.get_rng_state(), before)


def test_a_step_that_gives_a_pair_up_does_not_rewind_the_stream():
    run = Dropper().lose_a_pair()
    before = torch.get_rng_state()
    fresh = draw()
    torch.set_rng_state(before)
    with same_sample(run.opt):
        run.opt.step(run)  # restarts
    assert run.drawn[3] == fresh


def test_a_sample_can_be_entered_again_but_not_twice_at_once():
    sample = same_sample(Dropper().opt)
    with sample, pytest.raises(RuntimeError, match="is in use"), sample:
        pass
    with sample:
        pass


# -- threads -------------------------------------------------------------------------------------


def at_once(*runs):
    """Run them in a thread each; what one raises is raised here."""
    threads = ThreadPoolExecutor(len(runs))
    for result in [threads.submit(run) for run in runs]:
        result.result(timeout=30)


def test_pairs_in_two_threads_and_draws_under_the_lock_see_no_number_twice():
    runs, draws, done = [Dropper(), Dropper()], [], threading.Event()

    def draw_others():
        while not done.is_set():
            with pair_lock():
                draws.append(torch.rand(1).item())
            time.sleep(0.0002)

    def train():
        try:
            for _ in range(10_000):
                at_once(*(partial(run.take, 25, way) for run, way in zip(runs, EITHER_WAY)))
                if len(draws) > 20:  # the other thread has had its turns
                    break
            verify_closure(runs[0].opt, runs[0])
        finally:
            done.set()

    at_once(train, draw_others)
    pairs = [pair for run in runs for pair in run.pairs()]
    assert all(first == second for first, second in pairs)
    # In single precision numbers of a stream come twice by chance once in 2^24 pairs.
    assert len(set(pairs)) == len(pairs)
    assert len(draws) == len(set(draws)) > 10


def test_the_lock_is_let_go_whatever_happens_and_not_taken_without_a_replay():
    with pair_lock():
        at_once(*(partial(Dropper(replay_rng=False).take, 3, way) for way in EITHER_WAY))
    with pytest.raises(ZeroDivisionError):
        Dropper(fail_at=1).take(1)
    with pytest.raises(ZeroDivisionError), same_sample(Dropper().lose_a_pair().opt):
        _ = 1 / 0
    at_once(partial(Dropper().take, 1))  # in another thread
