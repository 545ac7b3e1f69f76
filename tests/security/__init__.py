"""The server attacked over its sockets."""
