"""`stormplus data`: list the data sets, or download them from their official sources."""

from __future__ import annotations

from pathlib import Path

import click

from stormplus_bench.data import (
    NAMES,
    VARIABLE,
    DownloadError,
    MissingData,
    data_folder,
    download,
    load,
)

SIZES = {"cifar10": "170 MB", "mnist": "12 MB", "shakespeare": "1 MB"}


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES), metavar="[NAME]...")
@click.option(
    "--data-dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    envvar=VARIABLE,
    help=f"Where data sets are kept.  [default: ${VARIABLE}, or a folder in your cache]",
)
def data(names: tuple[str, ...], folder: Path | None) -> None:
    """List the data sets cifar10, mnist and shakespeare, or download the given ones.

    The other workloads need no download. A workload without its data is skipped.

    \b
    Examples:
      stormplus data                     what is there, what is missing
      stormplus data mnist shakespeare   download two of them

    \b
    Exit codes: 0 everything is there; 1 something could not be downloaded or is broken;
    2 wrong usage; 130 interrupted (repeat the command to continue).
    """  # noqa: D301 - click's own mark
    click.echo(f"data folder: {data_folder(folder)}")
    failed = False
    for name in names or NAMES:
        broken = False
        try:
            if names and _state(name, folder) == "missing":
                download(name, folder)
            state = _state(name, folder)
        except KeyboardInterrupt:
            click.echo(f"interrupted: {name} is not complete", err=True)
            raise SystemExit(130) from None
        except (DownloadError, ValueError, OSError) as error:
            failed = broken = True
            state = f"failed: {error}"
        click.echo(f"{name:12s} {SIZES[name]:>7s}  {state}", err=broken)
    raise SystemExit(1 if failed and names else 0)


def _state(name: str, folder: Path | None) -> str:
    try:
        load(name, folder)
    except MissingData:
        return "missing"
    return "ready"
