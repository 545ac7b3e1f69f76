"""The dashboard: the page at /, its files, and the live state that it shows."""
