"""``python -m graphpass`` and the script ``graphpass``: the command line, or the extra that it needs."""

import sys


def main() -> None:
    """Run the command line; without typer exit with 1."""
    try:
        from graphpass.cli.app import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit("graphpass: the command line needs typer\n  remedy: pip install 'graphpass[cli]'")
    app()


if __name__ == "__main__":
    main()
