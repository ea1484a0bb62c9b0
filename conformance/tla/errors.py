"""What can go wrong on the way to TLC and back."""


class TlaError(Exception):
    """Above all errors of this package."""


class ToolchainError(TlaError):
    """TLC or a Java runtime is missing, or is not the one that the project is pinned to."""


class ManifestError(TlaError):
    """The manifest, or a model that it registers, does not say what it must."""


class TlcError(TlaError):
    """TLC rejected a specification or broke down. `report` is its own text, with file and line."""

    def __init__(self, summary: str, report: str) -> None:
        super().__init__(f"{summary}\n{report}" if report else summary)
        self.report = report


class DeadlineError(TlaError):
    """TLC ran past its deadline and was ended."""
