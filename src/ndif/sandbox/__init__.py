"""Isolation of untrusted code: kernel confinement of its process, and the Protector above that."""
