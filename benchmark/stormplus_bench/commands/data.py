"""`stormplus data`: where the data sets are, and fetching them from their official source."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from stormplus_bench.data import NAMES, VARIABLE, MissingData, cifar10_release, load, place
from stormplus_bench.download import RELEASES, DownloadError, fetch, unpack

INTERRUPTED = 130  # what shells report for Ctrl-C


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES), metavar="[NAME]...")
@click.option(
    "--data-dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    envvar=VARIABLE,
    help=f"Where data sets are kept.  [default: ${VARIABLE}]",
)
@click.pass_context
def data(ctx: click.Context, names: tuple[str, ...], folder: Path | None) -> None:
    """List the data sets of the benchmark, or fetch those NAMEd.

    Most workloads carry their data. Three are too large for that: cifar10, mnist and
    shakespeare. Their workloads read them from one folder, and are skipped without it:

    \b
        export STORMPLUS_DATA=~/data
        stormplus data                     # what there is, what is missing
        stormplus data mnist shakespeare   # fetch two of them
        stormplus compare networks         # now with their workloads

    A file is fetched from its official source, compared with its known checksum, and only
    then given its name. What is already there is checked and left alone. On a machine without
    a connection, copy the files yourself: the list says what belongs where.

    \b
    Exit codes: 0 all is there; 1 something could not be fetched or is broken;
    2 wrong usage; 130 interrupted (run the same command again to go on).
    """  # noqa: D301 - click's own mark: leave these lines as they are
    if not names:
        for name in NAMES:
            click.echo(_entry(name, folder))
        return
    if folder is None:
        raise click.UsageError(f"say where to put it: set {VARIABLE}, or give --data-dir DIR")
    folder = folder.expanduser().absolute()
    left, failed = list(dict.fromkeys(names)), False
    try:
        while left:
            try:
                click.echo(f"{left[0]}: {_provide(left[0], folder)}")
            except click.ClickException as error:
                failed = True
                error.show()
            left.pop(0)
    except KeyboardInterrupt:
        click.echo(
            f"\ninterrupted: {left[0]} is not complete. Files that are, stay. Go on with\n"
            f"    {_again(left, folder)}",
            err=True,
        )
        ctx.exit(INTERRUPTED)
    ctx.exit(1 if failed else 0)


def _again(names: list[str], folder: Path) -> str:
    return f"stormplus data {' '.join(names)} --data-dir {shlex.quote(str(folder))}"


def _entry(name: str, folder: Path | None) -> str:
    release = RELEASES[name]
    return (
        f"{name}: {_state(name, folder)}\n"
        f"    what    {release.what}\n"
        f"    size    {release.size}\n"
        f"    source  {release.source}\n"
        f"    place   {place(name, folder or '$' + VARIABLE)}\n"
    )


def _state(name: str, folder: Path | None) -> str:
    if folder is None:
        return f"no folder to look in (set {VARIABLE}, or give --data-dir DIR)"
    try:
        load(name, folder)
    except MissingData:
        return f"not there (fetch it with `{_again([name], folder)}`)"
    except (ValueError, OSError) as error:
        return f"broken: {error}"
    return "found"


def _provide(name: str, folder: Path) -> str:
    """Fetch what is missing of one data set; says what was done."""
    try:
        load(name, folder)
    except MissingData:
        pass
    except (ValueError, OSError) as error:  # perhaps the user's own file: never overwritten
        raise click.ClickException(str(error)) from error
    else:
        return f"already in {folder}"
    try:
        for remote in RELEASES[name].remotes:
            target = folder / remote.path
            placed_by_hand = target.exists()
            if remote.unpacks:
                fetch(remote, target)
                unpack(target, cifar10_release(folder))
                if not placed_by_hand:
                    target.unlink()
            elif not placed_by_hand:
                fetch(remote, target)
        load(name, folder)
    except DownloadError as error:
        raise click.ClickException(f"{error}\n{_by_hand(name, folder)}") from error
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    return f"fetched; use it with `export {VARIABLE}={shlex.quote(str(folder))}`"


def _by_hand(name: str, folder: Path) -> str:
    """What to get in another way, file by file, and what then."""
    files = [
        f"    {remote.url}\n      as {folder / remote.path}"
        for remote in RELEASES[name].remotes
        if remote.unpacks or not (folder / remote.path).exists()  # an archive there is a wrong one
    ]
    steps = ["Try again; or get in another way, and place", *files]
    return "\n".join([*steps, f"then run `{_again([name], folder)}`"])
