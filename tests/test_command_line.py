"""The command `stormplus`."""

import pytest
from click.testing import CliRunner

from stormplus_bench import cli


@pytest.mark.parametrize(
    ("arguments", "code"),
    [*(((name, "--help"), 0) for name in cli.COMMANDS), (("compar",), 2), (("--version",), 0)],
)
def test_exit_codes(arguments, code):
    done = CliRunner().invoke(cli.main, list(arguments))
    assert done.exit_code == code, done.output


def test_the_help_lists_all_commands():
    listed = CliRunner().invoke(cli.main, ["--help"]).output
    assert all(name in listed for name in cli.COMMANDS)


def test_a_misspelled_command_is_corrected():
    assert "did you mean 'compare'?" in CliRunner().invoke(cli.main, ["compar"]).stderr
