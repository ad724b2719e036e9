"""The command line: `stormplus ...` or `python -m stormplus ...`.

A command is one line in `COMMANDS`; its module is imported when the command is used.
"""

from __future__ import annotations

from importlib import import_module

try:
    import click
except ImportError as error:  # pragma: no cover
    raise SystemExit("the command line needs click: pip install 'stormplus[demo]'") from error

COMMANDS = {
    "bench-step": ("stormplus.bench.step_command:bench_step", "Time the optimizer's own work."),
    "compare": ("stormplus.bench.compare_command:compare", "Train workloads with every method."),
    "data": ("stormplus.bench.data_command:data", "Fetch the data sets, with checksums."),
    "paper": ("stormplus.bench.paper_command:paper", "The paper's experiment, at your scale."),
    "rates": ("stormplus.theory.rates.command:rates", "The paper's rates, measured."),
    "report": ("stormplus.bench.report_command:report", "One page with every picture and score."),
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        try:
            command = getattr(import_module(module), attribute)
        except ImportError as error:
            raise click.ClickException(f"{error}: pip install 'stormplus[bench]'") from error
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in sorted(COMMANDS.items())])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="stormplus")
def main() -> None:
    """STORM+: evidence for the paper's claims, on this machine."""
