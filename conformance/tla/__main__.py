"""``python -m conformance.tla`` is ``omni-prefix model-check``."""

from conformance.tla.cli import app

if __name__ == "__main__":
    app()
