"""Both evaluations of a sample: the same random numbers, and statistics that move once."""

import copy
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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


def take(model, opt, x, way):
    def evaluate():
        return backward(model, opt, x)

    if way == "closure":
        opt.step(same_sample(opt, model)(evaluate))
        return
    with same_sample(opt, model):
        opt.step(evaluate) if way == "context" else halves(opt, evaluate)


def train(model, way, samples=X):
    opt = StormPlus(model.parameters(), lr=0.3)
    for i, x in enumerate(samples):
        torch.manual_seed(i)
        take(model, opt, x, way)
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


def buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


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
@pytest.mark.parametrize("failure", ["raises", "nan"])
def test_a_first_evaluation_that_fails_is_not_seen_by_the_statistics(way, at, failure):
    model = network()
    opt = train(model, way, X[:at])
    before, bad = buffers(model), X[at].clone()
    bad[0, 0] = float("nan")
    kind, sample = (FloatingPointError, bad) if failure == "nan" else (ZeroDivisionError, X[at])
    hook = model.register_forward_hook(lambda *_: 1 / 0 if failure == "raises" else None)
    with pytest.raises(kind):
        take(model, opt, sample, way)
    hook.remove()
    assert_same(buffers(model), before)
    take(model, opt, X[at], way)
    assert model[1].num_batches_tracked == at + 1
    opt.step(lambda: backward(model, opt, X[at + 1]))  # and nothing is left behind
    assert model[1].num_batches_tracked == at + 3


@pytest.mark.parametrize(
    ("failure", "kind"), [("inf", FloatingPointError), ("no backward", RuntimeError)]
)
@pytest.mark.parametrize("way", ["closure", "same context", "new context"])
def test_a_second_evaluation_tried_again_is_the_same_sample(way, failure, kind):
    # A second evaluation that fails: statistics and masks are those of one clean evaluation.
    model, expected = network(), network()
    opt = train(model, "closure", X[:3])
    train(expected, "closure", X[:4])
    torch.manual_seed(3)
    calls = []

    def evaluate():
        calls.append(None)
        loss = backward(model, opt, X[3], float("inf") if len(calls) == 2 else 1.0)
        if len(calls) == 2 and failure == "no backward":
            opt.zero_grad()
        return loss

    def complete():
        evaluate()
        opt.estimate()

    if way == "closure":
        with pytest.raises(kind):
            opt.step(same_sample(opt, model)(evaluate))
    else:
        with same_sample(opt, model):
            with pytest.raises(kind):
                halves(opt, evaluate)
            if way == "same context":
                complete()
    if way != "same context":
        torch.rand(5)  # the stream goes on elsewhere meanwhile
        with same_sample(opt, model):
            complete()
    for (name, a), b in zip(model.state_dict().items(), expected.state_dict().values()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


# -- random numbers ------------------------------------------------------------------------------


class Dropper:
    """Records the random number of each evaluation, and raises in that of number `fail_at`."""

    def __init__(self, fail_at=None, generator=None, **options):
        self.p = nn.Parameter(torch.ones(2))
        self.opt = StormPlus([self.p], **options)
        self.drawn, self.fail_at, self.generator = [], fail_at, generator

    def __call__(self):
        self.opt.zero_grad()
        self.drawn.append(torch.rand(1, generator=self.generator).item())
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
        return self.drawn


@pytest.mark.parametrize("replay", [True, False, []], ids=str)
@pytest.mark.parametrize("way", ["step", "halves"])
def test_the_stream_is_replayed_and_goes_on_from_the_second_evaluation(replay, way):
    torch.manual_seed(0)
    drawn = Dropper(replay_rng=replay).take(2, way)
    after = torch.rand(1).item()
    torch.manual_seed(0)
    a, b, c, d = (torch.rand(1).item() for _ in range(4))
    assert [*drawn, after] == ([a, b, c, d] if replay is False else [a, b, b, c])


@pytest.mark.parametrize("copied", [False, True])
def test_generators_of_the_users_own_are_replayed(copied):
    generator = torch.Generator().manual_seed(5)
    run = Dropper(generator=generator, replay_rng=[generator])
    if copied:  # a copy replays the user's generator, not a copy of it
        run.p, run.opt = copy.deepcopy((run.p, run.opt))
    drawn = run.take(3)
    fresh = torch.Generator().manual_seed(5)
    a, b, c = (torch.rand(1, generator=fresh).item() for _ in range(3))
    assert drawn == [a, b, b, c, c]


@pytest.fixture
def lost_pair():
    torch.manual_seed(0)
    return with_lost_pair(Dropper(fail_at=3))


def with_lost_pair(run):
    run.take(1)
    with pytest.raises(ZeroDivisionError):
        run.take(1)
    assert run.opt.pending
    return run


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("own", [False, True])  # a generator of the user's, or torch's stream
def test_a_pending_pair_is_completed_with_its_own_random_numbers(saved, own):
    stream = torch.Generator() if own else torch.default_generator
    options = {"generator": stream, "replay_rng": [stream] if own else True}
    stream.manual_seed(0)
    lost = with_lost_pair(Dropper(fail_at=3, **options))
    run = lost
    if saved:  # through a checkpoint, in a process whose streams stand elsewhere
        run = Dropper(**options)
        run.opt.load_state_dict(lost.opt.state_dict())
    stream.manual_seed(99)
    with same_sample(run.opt):
        run()
        run.opt.estimate()
    assert run.drawn[-1] == lost.drawn[1]


def test_a_step_that_gives_a_pair_up_does_not_rewind_the_stream(lost_pair):
    before = torch.get_rng_state()
    fresh = torch.rand(1).item()
    torch.set_rng_state(before)
    with same_sample(lost_pair.opt):
        lost_pair.opt.step(lost_pair)  # restarts
    assert lost_pair.drawn[3] == fresh


def test_halves_begun_outside_are_not_rewound():
    run = Dropper()
    run.take(1)
    run()
    run.opt.move()
    before = torch.get_rng_state()
    with same_sample(run.opt):
        assert torch.equal(torch.get_rng_state(), before)
        run.opt.estimate()


def test_a_sample_can_be_entered_again_but_not_twice_at_once():
    sample = same_sample(Dropper().opt)
    with sample, pytest.raises(RuntimeError, match="is in use"), sample:
        pass
    with sample:
        pass


def test_a_wrapped_closure_inside_the_context_does_not_end_it():
    # Dropout is replayed by the context, whatever the wrapper does.
    run = Dropper()
    for _ in range(3):
        with same_sample(run.opt) as sample:
            halves(run.opt, sample(run))
    assert run.drawn[1::2] == run.drawn[2::2]


# -- dropout in training loops --------------------------------------------------------------------


def whole_batch(model, x):
    model(x).square().mean().backward()


def micro_batches(model, x):
    for part in x.chunk(4):
        (model(part).square().mean() / 4).backward()


def compiled(model, x):
    torch.compile(model)(x).square().mean().backward()


def recomputed(reentrant):
    def backward(model, x):
        x = x.clone().requires_grad_()  # what the reentrant kind needs
        checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()

    return backward


LOOPS = {
    "micro-batches": micro_batches,
    "compiled": compiled,
    "activation checkpointing": recomputed(False),
    "reentrant checkpointing": recomputed(True),
}


def dropout_gradients(backward):
    """Return the gradients of three steps with lr = 0: all are taken at one point."""
    torch.manual_seed(0)
    model, gradients = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.5)), []
    opt = StormPlus(model.parameters(), lr=0.0)

    def closure():
        opt.zero_grad()
        backward(model, X[0])
        gradients.append(model[0].weight.grad.clone())

    for _ in range(3):
        opt.step(closure)
    return gradients


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n == "compiled" else n for n in LOOPS]
)
def test_dropout_has_the_same_masks_in_both_evaluations(name):
    a, b, b_again, c, c_again = found = dropout_gradients(LOOPS[name])
    assert_same([b, c], [b_again, c_again])
    assert not torch.equal(a, b)
    assert not torch.equal(b, c)
    if "checkpointing" in name:  # which puts the stream back after its recomputation
        torch.testing.assert_close(found, dropout_gradients(whole_batch))


# -- threads -------------------------------------------------------------------------------------


class Masks(Dropper):
    """A run that draws slowly, twice in each evaluation."""

    def __call__(self):
        loss = super().__call__()
        time.sleep(0.0005)  # others get their turn
        self.drawn[-1] = (self.drawn[-1], torch.rand(1).item())
        return loss

    def pairs(self):
        return list(zip(self.drawn[1::2], self.drawn[2::2]))


def at_once(*runs):
    """Run them in a thread each; what one raises is raised here."""
    errors = []

    def guarded(run):
        try:
            run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(run,), daemon=True) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("way", ["step", "halves"])
def test_pairs_in_two_threads_have_their_own_random_numbers(way):
    runs = [Masks(), Masks()]
    at_once(*(lambda run=run: run.take(25, way) for run in runs))
    pairs = [pair for run in runs for pair in run.pairs()]
    assert all(first == second for first, second in pairs)
    assert len(set(pairs)) == len(pairs)  # no two pairs the same


def test_a_thread_that_draws_under_the_lock_beside_pairs_sees_no_number_twice():
    run, draws, done = Masks(), [], threading.Event()

    def draw():
        while not done.is_set():
            with pair_lock():
                draws.append(torch.rand(1).item())
            time.sleep(0.0002)

    def train():
        try:
            for _ in range(10_000):
                run.take(25)
                if len(draws) > 20:  # the other thread has had its turns
                    break
            verify_closure(run.opt, run)
        finally:
            done.set()

    at_once(train, draw)
    assert all(first == second for first, second in run.pairs())
    # In single precision numbers of a stream come twice by chance once in 2^24 pairs.
    assert len(draws) == len(set(draws)) > 10


def test_no_lock_without_a_replay():
    runs = [Masks(replay_rng=False), Masks(replay_rng=False)]
    with pair_lock():
        at_once(lambda: runs[0].take(3), lambda: runs[1].take(3, "halves"))


def test_the_lock_is_let_go_whatever_happens(lost_pair):
    with pytest.raises(ZeroDivisionError):
        Dropper(fail_at=1).take(1)
    with pytest.raises(ZeroDivisionError), same_sample(lost_pair.opt):
        _ = 1 / 0
    lost_pair.opt.pending_streams = torch.ones(7, dtype=torch.uint8)  # of other devices
    with pytest.raises(RuntimeError, match="7 bytes of random state"):
        same_sample(lost_pair.opt).__enter__()
    at_once(lambda: Masks().take(1))  # in another thread
