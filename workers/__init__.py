"""Act: one process, one GPU: expert store, slot cache, exchange, engine, recorder. No ray."""
