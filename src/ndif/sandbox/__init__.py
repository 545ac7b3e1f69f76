"""Isolation of untrusted code: the kernel's confinement of a process, and the Protector above it."""
