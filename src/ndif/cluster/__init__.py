"""The existing replicas, which the controller creates, watches and ends as placement decides."""
