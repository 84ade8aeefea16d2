"""`minitlt` and `python -m minitlt`: cli.py, with Ctrl-C heard while it is still being loaded."""

import sys


def main() -> None:
    try:
        from minitlt.cli import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
