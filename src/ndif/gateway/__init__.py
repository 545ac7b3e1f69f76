"""The door: routes, the two live channels, results, and the read-only hub."""
