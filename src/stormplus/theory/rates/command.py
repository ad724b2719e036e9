"""`stormplus rates`: run the methods, then show a table and a figure.

Each method runs in a process of its own. These processes end with us, however we end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from stormplus.files import require_writable
from stormplus.interrupts import EXIT_CODES, Unfinished, explained, interruptible
from stormplus.progress import Pulse
from stormplus.theory.rates.experiment import METHODS, Plan, Result, run_method
from stormplus.theory.rates.report import table
from stormplus.theory.rates.store import WRITTEN, load, read, save, write

EXAMPLES = f"""\b
Examples:
  stormplus rates --quick --output out/quick    a look, in seconds
  stormplus rates                               everything, about five minutes on two cores
  stormplus rates --method storm+ --method sgd  two methods; the others can follow
  stormplus rates --redraw                      the figure again, from what is there

\b
Writes into OUTPUT:
  methods/NAME.json   a method's result, as soon as it is there
  rates.json          the raw rows of all methods that OUTPUT holds
  rates_summary.json  plan, versions, tuning, slopes, means over seeds
  rates.md, rates.png the table and the figure

Interrupt at will: each finished method is in OUTPUT/methods, and the same command goes on.
One OUTPUT holds one plan: --quick and the full plan are never mixed, the second is refused.

{EXIT_CODES}"""


@click.command(epilog=EXAMPLES)
@click.option("--quick", is_flag=True, help="Seconds instead of minutes: T to 3,000, 6 seeds.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default="out/rates",
    show_default=True,
    help="Where results, table and figure go.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=min(2, os.cpu_count() or 1),
    show_default=True,
    help="Methods side by side.",
)
@click.option(
    "--method",
    "methods",
    type=click.Choice(METHODS),
    multiple=True,
    help="Run only this one; may be repeated.  [all]",
)
@click.option("--redraw", is_flag=True, help="Draw what OUTPUT holds; run nothing.")
def rates(quick: bool, output: Path, jobs: int, methods: tuple[str, ...], redraw: bool) -> None:
    """Measure E|grad f(x_bar_T)| against T and sigma, and fit the slopes.

    Runs STORM+, simplified STORM+, STORM, SGD and AdaGrad-norm on a problem that meets every
    assumption of the paper, and sets the exponents of T beside those that theory proves.
    """
    console = Console()
    with explained(output / "methods", console):
        if redraw:
            results, plan = read(output)
        else:
            plan = Plan.quick() if quick else Plan()
            load(output, plan)  # another plan's folder is left as it is
            require_writable(output, WRITTEN)
            require_writable(output / "methods")
            run_missing(plan, methods or METHODS, output, jobs, console)
            results = load(output, plan)
        files = write(results, plan, output)
    console.print(table(results, plan), soft_wrap=True, markup=False)
    names = ", ".join(str(file) for file in files)
    console.print(f"wrote {names}", highlight=False, markup=False, soft_wrap=True)


def run_missing(
    plan: Plan, methods: tuple[str, ...], output: Path, jobs: int, console: Console
) -> None:
    """Run those methods that the folder does not have yet, and show how far they are."""
    done = load(output, plan)
    missing = [name for name in METHODS if name in methods and name not in done]
    console.print(
        f"to run: {', '.join(missing) or 'nothing'}; "
        f"already in {output / 'methods'}: {', '.join(done) or 'nothing'}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    columns = (TextColumn("{task.description:>18}"), BarColumn(), TimeElapsedColumn())
    errors = Console(stderr=True)
    pulse, reached = Pulse(errors), dict.fromkeys(missing, 0)

    def keep(result: Result) -> None:
        save(result, plan, output)
        display.update(tasks[result.method], completed=plan.steps)

    def show(name: str, step: int) -> None:
        display.start_task(tasks[name])  # its clock; later calls change nothing
        display.update(tasks[name], completed=step)
        reached[name] = step
        pulse.beat(", ".join(f"{n} {at / plan.steps:.0%}" for n, at in reached.items()))

    with Progress(*columns, console=errors) as display:
        tasks = {name: display.add_task(name, total=plan.steps, start=False) for name in missing}
        run_all(plan, missing, jobs, keep, show)


class MethodFailed(Unfinished):
    """A method's process ended without a result."""


def run_all(
    plan: Plan,
    methods: Sequence[str],
    jobs: int,
    keep: Callable[[Result], None],
    show: Callable[[str, int], None] = lambda *_: None,
) -> None:
    """Run the methods, several at a time.

    Args:
        plan: What is run.
        methods: Their names.
        jobs: How many at a time.
        keep: Called with each result as soon as it is there.
        show: Called with a method's name and step; first with 0, when it starts.

    Raises:
        MethodFailed: One gave no result; the others have been ended.
        KeyboardInterrupt: After all of them have been ended.
    """
    left = list(methods)
    running: dict[Connection, tuple[str, BaseProcess]] = {}
    with interruptible():
        try:
            while left or running:
                while left and len(running) < jobs:
                    name = left.pop(0)
                    with _no_ctrl_c():  # the process inherits that: Ctrl-C reaches it through us
                        pipe, process = _start(name, plan)
                        running[pipe] = name, process
                    show(name, 0)
                ready = wait(list(running))
                for pipe in [pipe for pipe in running if pipe in ready]:
                    _listen(pipe, running, keep, show)
        finally:
            for _, process in running.values():
                process.terminate()
            for _, process in running.values():
                process.join()


def _start(name: str, plan: Plan) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(name, plan, theirs), daemon=True)
    process.start()
    theirs.close()  # else its end would not be seen here
    return ours, process


def _work(name: str, plan: Plan, pipe: Any) -> None:
    """In the other process: send steps, at last the result."""
    # A broken pipe: whoever started us was killed, and nobody wants the result.
    with contextlib.suppress(BrokenPipeError):
        pipe.send(run_method(name, plan, pipe.send))


def _listen(
    pipe: Connection,
    running: dict[Connection, tuple[str, BaseProcess]],
    keep: Callable[[Result], None],
    show: Callable[[str, int], None],
) -> None:
    name, process = running[pipe]
    try:
        news = pipe.recv()
    except EOFError:
        process.join()
        raise MethodFailed(
            f"{name} ended without a result (exit code {process.exitcode}); an error is shown "
            "above, without one it was killed, perhaps for want of memory. What is done is kept: "
            "the same command goes on"
        ) from None
    if isinstance(news, Result):
        with _no_ctrl_c():
            keep(news)
        process.join()
        del running[pipe]
        pipe.close()
    else:
        show(name, news)


@contextlib.contextmanager
def _no_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C wait until this is done."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # else the first process starts it, which lets Ctrl-C through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
