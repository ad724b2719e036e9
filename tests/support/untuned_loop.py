"""The loop of any torch optimizer, with Untuned: what a trainer's run is compared with."""

from stormplus import Untuned


def untuned_loop(model, samples, loss_of, snapshot, *, each=lambda i: None, window=1, **options):
    """Snapshots after every step, and the optimizer; `each(i)` runs before sample i."""
    opt = Untuned(model.parameters(), **options)
    model.train()
    states = []
    for i, (x, y) in enumerate(samples):
        each(i)
        (loss_of(model, x, y) / window).backward()
        if (i + 1) % window == 0:
            opt.step()
            opt.zero_grad()
            states.append(snapshot(model))
    return states, opt
