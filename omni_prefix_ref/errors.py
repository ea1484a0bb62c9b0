"""What the machine refuses, and how it says "not now".

The contract's errors carry the names of the production package's, so that outcomes compare by class name alone::

    OmniPrefixCacheUnmatchError            base of them all
    |-- OmniPrefixCacheContractError       a call out of order, or a wrong id or shape; nothing was changed by it
    |-- OmniPrefixCacheRowError            a row that is owed cannot be handed over
    |-- OmniPrefixCacheWriteError          a write failed; sticky
    |-- OmniPrefixCacheStagingTimeoutError a bounded wait ran out
    `-- OmniPrefixCacheClosedError         used after shutdown

Two more are the model's own: `NotEnabled` is a guard that does not hold (whoever runs the action waits, or does
something else first), `RuleBroken` an assertion that failed.
"""

from __future__ import annotations


class OmniPrefixCacheUnmatchError(RuntimeError):
    """Base of every error of the contract."""


class OmniPrefixCacheContractError(OmniPrefixCacheUnmatchError):
    """A public call broke the contract. No state was changed by it."""


class OmniPrefixCacheRowError(OmniPrefixCacheUnmatchError):
    """A row that is owed to the consumer does not exist."""


class OmniPrefixCacheWriteError(OmniPrefixCacheUnmatchError):
    """A write to the pool failed. Every later public call raises this again."""


class OmniPrefixCacheStagingTimeoutError(OmniPrefixCacheUnmatchError):
    """A bounded wait ran out."""


class OmniPrefixCacheClosedError(OmniPrefixCacheUnmatchError):
    """The cache was used after it was shut down."""


class NotEnabled(Exception):  # noqa: N818 - it is not an error: the action's guard is false in this state
    """The action's guard does not hold in this state. Whoever wants to run it waits."""


class RuleBroken(AssertionError):  # noqa: N818 - the rule is broken; the name says so
    """An assertion of the machine failed. `rule` is its name."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
