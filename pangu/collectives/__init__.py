"""Communication between ranks: collectives, point-to-point messages, and agreement through the store."""
