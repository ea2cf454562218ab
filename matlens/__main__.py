"""The command line, as ``matlens`` and as ``python -m matlens``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; interruptions print one line, even during imports."""
    try:
        from matlens.cli.app import main as run

        run()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
