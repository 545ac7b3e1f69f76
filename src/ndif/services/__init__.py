"""What a server of many machines stands on: Redis, an S3 server, Ray. Used where they are, else started."""
