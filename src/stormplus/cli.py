"""The command line: `stormplus ...` or `python -m stormplus ...`.

The library has two commands of its own, `doctor` and `rates`. Other distributions add theirs
through the entry points of the group `stormplus.commands`, each of which names a click command. A
command's module is imported when the command is used, never for the list of commands.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

import click

from stormplus.install import BENCH, how_to

GROUP = "stormplus.commands"
OWN = {
    "doctor": "stormplus.doctor:doctor",
    "rates": "stormplus.theory.rates.command:rates",
}
# What the list says of each command, those of stormplus-bench too: so the list imports nothing,
# and somebody who has not installed them learns what is missing.
COMMANDS = {
    "bench-step": "Time the optimizer's own work.",
    "compare": "Train workloads with every method.",
    "data": "Fetch the data sets, with checksums.",
    "doctor": "What is installed, and what is missing.",
    "paper": "The paper's experiment, at your scale.",
    "rates": "The paper's rates, measured.",
    "report": "One page with every figure and score.",
    "robust": "Models that have broken an optimizer.",
}


def _added() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*COMMANDS, *_added()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in OWN:
            module, attribute = OWN[cmd_name].split(":")
            try:
                command = getattr(import_module(module), attribute)
            except ImportError as error:
                raise click.ClickException(f"{error}: {how_to('theory')}") from error
        elif entry := _added().get(cmd_name):
            try:
                command = entry.load()
            except ImportError as error:
                name = entry.dist.name if entry.dist else cmd_name
                raise click.ClickException(f"{error}: pip install {name}") from error
        elif cmd_name in COMMANDS:
            raise click.ClickException(f"{cmd_name} is a command of stormplus-bench: {BENCH}")
        else:
            return None
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        added = _added()
        texts = {name: f"From {e.dist.name}." if e.dist else "" for name, e in added.items()}
        with formatter.section("Commands"):
            formatter.write_dl(sorted((texts | COMMANDS).items()))
        if missing := sorted(COMMANDS.keys() - OWN.keys() - added.keys()):
            formatter.write_paragraph()
            formatter.write_text(f"Not installed: {', '.join(missing)}. {BENCH}")


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="stormplus")
def main() -> None:
    """STORM+: evidence for the paper's claims, on this machine."""
