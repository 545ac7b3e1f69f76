"""The broker on Redis or Valkey."""
