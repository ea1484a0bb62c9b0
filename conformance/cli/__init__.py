"""The command line, ``omni-prefix``.

The environment may lack what a command needs (vLLM, a Java runtime, or torch): every command imports its own part when
it runs, and says which extra to install if that fails.
"""

try:
    from conformance.cli.app import app, main
except ModuleNotFoundError as error:
    if error.name not in {"typer", "rich"}:
        raise
    raise SystemExit(
        f"omni-prefix needs {error.name!r}: install the extra, pip install 'omni-prefix-cache[conformance]', or run "
        "`make venv`"
    ) from error

__all__ = ["app", "main"]
