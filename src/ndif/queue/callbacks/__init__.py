"""Callbacks of ended jobs: their guard, their two forms, and their delivery with retries."""
