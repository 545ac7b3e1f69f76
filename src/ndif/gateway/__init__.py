"""The HTTP server: submission, live channels, results, the operator API, and the mirror of the hub."""
