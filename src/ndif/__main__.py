"""`python -m ndif`: the command line."""

from ndif.cli.main import cli

cli()
