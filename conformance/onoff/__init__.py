"""Cache on against cache off, on the built-in engine: the only oracle that counts in the end.

The same requests run twice. With prefix caching off every row is computed; with it on, hit rows come from the cache
under test. Every row handed over at the same absolute position must have the same bits, and no position may be missing.
"""

from conformance.onoff.consumer import Consumer, Manners
from conformance.onoff.ledger import Ledger, Owed, Ticket
from conformance.onoff.rounds import Round, draw_round
from conformance.onoff.run import Cache, CacheFactory, RoundResult, Tally, run_round

__all__ = [
    "Cache",
    "CacheFactory",
    "Consumer",
    "Ledger",
    "Manners",
    "Owed",
    "Round",
    "RoundResult",
    "Tally",
    "Ticket",
    "draw_round",
    "run_round",
]
