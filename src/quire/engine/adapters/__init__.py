"""Adapters: LoRAs over one model, of which each request may have its own."""
