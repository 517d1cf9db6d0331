"""Ledgers on Apache BookKeeper: a native asyncio client of stock bookies."""
