"""Signals that end a long command as Ctrl-C does."""

import signal

import pytest

from stormplus.interrupts import interruptible


@pytest.fixture(params=[s for s in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, s)])
def sign(request):
    number = getattr(signal, request.param)
    before = signal.getsignal(number)
    yield number
    signal.signal(number, before)


def test_it_is_heard_inside_and_put_back_after(sign):
    def other(_sign, _frame):
        raise AssertionError("not this one")

    signal.signal(sign, other)
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(sign)
    assert signal.getsignal(sign) is other


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no such signal here")
def test_under_nohup_a_closed_terminal_ends_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
