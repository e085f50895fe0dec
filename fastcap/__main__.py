"""``python -m fastcap``, and what the command ``fastcap`` runs."""

import sys


def main() -> int:
    """Run the command line and return its exit code; Ctrl-C ends it quietly even while it is still being imported."""
    try:
        from fastcap.cli import main as run_command_line

        return run_command_line()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            sys.stderr.write("fastcap: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
