"""Checkpoints as safetensors and JSON, written atomically, read without executing anything."""
