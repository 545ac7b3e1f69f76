"""The dashboard: the page at /, its files, and its live state."""
