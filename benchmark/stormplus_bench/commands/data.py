"""`stormplus data`: list the data sets, or download them from their official sources."""

from pathlib import Path

import click

from stormplus_bench import data as sets
from stormplus_bench.interrupts import EXIT_CODES

SIZES = {"cifar10": "170 MB", "mnist": "12 MB", "shakespeare": "1 MB"}


@click.command(epilog=EXIT_CODES)
@click.argument("names", nargs=-1, type=click.Choice(sets.NAMES), metavar="[NAME]...")
@click.option(
    "--data-dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    envvar=sets.VARIABLE,
    help=f"Where data sets are kept.  [default: ${sets.VARIABLE}, or a folder in your cache]",
)
def data(names: tuple[str, ...], folder: Path | None) -> None:
    """List the data sets cifar10, mnist and shakespeare, or download the given ones.

    The other workloads need no download. A workload without its data is skipped.

    \b
    Examples:
      stormplus data                     what is there, what is missing
      stormplus data mnist shakespeare   download two of them
    """  # noqa: D301 - click's own mark
    click.echo(f"data folder: {sets.data_folder(folder)}")
    failed = False
    for name in names or sets.NAMES:
        state = "ready"
        try:
            if names:
                sets.download(name, folder)
            sets.load(name, folder)
        except KeyboardInterrupt:
            click.echo(f"interrupted: {name} is not complete", err=True)
            raise SystemExit(130) from None
        except sets.MissingData:
            state = "missing"
        except (sets.DownloadError, ValueError, OSError) as error:
            failed, state = True, f"failed: {error}"
        click.echo(f"{name:12s} {SIZES[name]:>7s}  {state}", err=state.startswith("failed"))
    raise SystemExit(1 if failed and names else 0)
