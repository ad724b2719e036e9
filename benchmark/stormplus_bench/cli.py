"""The command `stormplus`; a command's module is imported when the command is used."""

from importlib import import_module

import click

COMMANDS = {
    "bench-step": "Time an optimizer step, gradients excluded.",
    "compare": "Train workloads with every method.",
    "data": "List or download the data sets.",
    "report": "Write figures and tables from rows.",
    "robust": "Train models that have broken an optimizer.",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        name = cmd_name.replace("-", "_")
        command = getattr(import_module(f"stormplus_bench.commands.{name}"), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="stormplus-bench")
def main() -> None:
    """Benchmark STORM+, Untuned and your own optimizers.

    `python -m stormplus.doctor` shows what is installed.
    """


if __name__ == "__main__":
    main(prog_name="stormplus")
