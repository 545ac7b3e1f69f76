"""Callbacks of ended jobs: their guard, webhooks, and their delivery with retries."""
