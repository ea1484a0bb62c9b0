"""A browser without a window: what a page looks like, and what its script made of it."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 90.0
"""A browser takes a second or two to start; on a busy machine, many more."""
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--run-all-compositor-stages-before-draw",
    "--virtual-time-budget=10000",
)


def find_browser() -> str | None:
    """Where a chromium is, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name)) is not None), None)


def screenshot(page: Path, png: Path, *, moment: int | None = None, size: tuple[int, int] = (1320, 1340)) -> None:
    """Draw a page at a moment into a PNG file. Raises `RuntimeError` without a browser, or if it fails."""
    png.unlink(missing_ok=True)
    _run(page, moment, f"--window-size={size[0]},{size[1]}", f"--screenshot={png.resolve()}")
    if not png.is_file():
        raise RuntimeError(f"the browser wrote no {png}")


def rendered(page: Path, *, moment: int | None = None) -> str:
    """The page as HTML once its script has run. Raises `RuntimeError` without a browser, or if it fails."""
    return _run(page, moment, "--dump-dom")


def _run(page: Path, moment: int | None, *options: str) -> str:
    browser = find_browser()
    if browser is None:
        raise RuntimeError(f"no browser: install one of {', '.join(NAMES)}")
    address = page.resolve().as_uri() + ("" if moment is None else f"#moment={moment}")
    # A profile of its own: another browser of this user would be asked to open the page instead.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [browser, *QUIET, f"--user-data-dir={profile}", *options, address]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as late:
            raise RuntimeError(f"{browser} did not end within {TIMEOUT_S:g} s") from late
    if done.returncode != 0:
        raise RuntimeError(f"{browser} ended with {done.returncode}: {done.stderr[-500:]}")
    return done.stdout
