"""The connection to Redis or Valkey that every store on it uses."""
