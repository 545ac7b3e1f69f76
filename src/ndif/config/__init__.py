"""Settings, their reference, and units."""
