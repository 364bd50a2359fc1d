"""``python -m graphpass``: the command line."""

from graphpass.cli.app import main

if __name__ == "__main__":
    main()
