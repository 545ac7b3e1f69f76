"""Operations on deployments, and reports of a server's state."""
