"""``python -m dlpack_loader`` and the ``dlpack-loader`` command."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say what it needs."""
    try:
        from dlpack_loader.cli import app
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        sys.exit(f"dlpack-loader needs the package {error.name}: pip install 'dlpack_loader[cli]'")
    app()


if __name__ == "__main__":
    main()
