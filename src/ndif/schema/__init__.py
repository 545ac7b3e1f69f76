"""Data that travels: requests, responses, model keys, deployments, and the forms of both wires."""
