"""Ledgers on Apache BookKeeper: an asyncio client of our own."""
