"""How the runs of trainers are compared with the plain loop's."""

import torch


def assert_at_average(state, plain, step):
    """All weights are those of the average after a step of `untuned_run`, not of the iterate."""
    average, iterate = plain.averages[step - 1], plain.states[step - 1]
    close = 1e-9 if average["body.0.weight"].dtype == torch.float64 else 1e-6
    for name, value in average.items():
        torch.testing.assert_close(state[name], value, rtol=close, atol=close)
    apart = (average["body.0.weight"] - iterate["body.0.weight"]).abs().max()
    assert apart > 20 * close


def assert_same_states(states, expected):
    assert len(states) == len(expected) > 0
    for step, (ours, theirs) in enumerate(zip(states, expected)):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert torch.equal(ours[name], theirs[name]), f"{name} differs after step {step + 1}"


def assert_same_runs(run, plain):
    assert_same_states(run.states, plain.states)
    assert any(not torch.equal(plain.states[0][k], v) for k, v in plain.states[-1].items())
    assert run.net.evaluations == plain.net.evaluations
    assert run.opt.diagnostics() == plain.opt.diagnostics()


def hooks_left(opt):
    return [*opt._pass_hooks.values(), *opt._optimizer_step_pre_hooks.values()]


def warnings_with(recwarn, text):
    return [str(w.message) for w in recwarn if text in str(w.message)]
