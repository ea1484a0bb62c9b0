"""Every error that the cache raises on purpose.

::

    OmniPrefixCacheUnmatchError            whatever keeps cache and engine from matching; catch this for all of them
    |-- OmniPrefixCacheConfigError         a stage or setting that the cache refuses, found before the first step
    |-- OmniPrefixCacheContractError       a call out of order, a wrong id, shape or dtype; nothing was changed by it
    |-- OmniPrefixCacheRowError            a row that is owed cannot be handed over (a hit with hidden rows absent)
    |-- OmniPrefixCacheWriteError          a write failed; sticky, every later entry raises it again
    |-- OmniPrefixCacheStagingTimeoutError a bounded wait ran out: a staging page, a write, a read in progress
    `-- OmniPrefixCacheClosedError         the cache was shut down

Each message names the setting, request, step or task to look at.
"""

from __future__ import annotations


class OmniPrefixCacheUnmatchError(RuntimeError):
    """Cache and engine do not match. Base of every error that the cache raises on purpose."""


class OmniPrefixCacheConfigError(OmniPrefixCacheUnmatchError):
    """A stage or a setting that the cache refuses. The message names the setting to change."""


class OmniPrefixCacheContractError(OmniPrefixCacheUnmatchError):
    """A public call broke the contract (order, id, shape, dtype). No table was changed by that call."""


class OmniPrefixCacheRowError(OmniPrefixCacheUnmatchError):
    """A row that is owed to the consumer does not exist. Handing over anything else would be a wrong row."""


class OmniPrefixCacheWriteError(OmniPrefixCacheUnmatchError):
    """A write to the pool failed. Sticky: every later public call raises it, naming the write that failed first."""


class OmniPrefixCacheStagingTimeoutError(OmniPrefixCacheUnmatchError):
    """A wait reached `staging_claim_timeout_s`. Names the unconsumed step ids, or the stuck task and its state."""


class OmniPrefixCacheClosedError(OmniPrefixCacheUnmatchError):
    """The cache was used after `shutdown()`."""
