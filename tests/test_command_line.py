"""The command `stormplus`."""

import pytest
from click.testing import CliRunner

from stormplus_bench import cli
from tests.support.pages import run_python


def test_the_list_of_commands_imports_no_framework():
    code = (
        "import sys\nfrom stormplus_bench.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'pandas', 'matplotlib', 'rich') if m in sys.modules])"
    )
    done = run_python("-c", code)
    assert all(name in done.stdout for name in cli.COMMANDS)
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [*(((name, "--help"), 0) for name in cli.COMMANDS), (("compar",), 2), (("--version",), 0)],
)
def test_exit_codes(arguments, code):
    done = CliRunner().invoke(cli.main, list(arguments))
    assert done.exit_code == code, done.output


def test_a_misspelled_command_is_corrected():
    assert "did you mean 'compare'?" in CliRunner().invoke(cli.main, ["compar"]).stderr
