"""The command `stormplus`; a command's module is imported when the command is used."""

import difflib
from collections.abc import Iterable
from importlib import import_module

import click

COMMANDS = {
    "bench-step": "Time an optimizer step, gradients excluded.",
    "compare": "Train workloads with every method.",
    "data": "List or download the data sets.",
    "report": "Write figures and tables from rows.",
    "robust": "Train models that have broken an optimizer.",
}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown word, with the closest known one."""
    by_lower = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), list(by_lower), n=1)
    return f", did you mean {by_lower[close[0]]!r}?" if close else "."


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in COMMANDS:
            ctx.fail(f"No command {cmd_name!r}{did_you_mean(cmd_name, COMMANDS)}")
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

    `python -m stormplus.doctor` shows what is installed. For completion in bash (or zsh, fish):

        eval "$(_STORMPLUS_COMPLETE=bash_source stormplus)"
    """


if __name__ == "__main__":
    main(prog_name="stormplus")
