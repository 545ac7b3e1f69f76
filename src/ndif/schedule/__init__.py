"""The calendar that says which deployments are scheduled when."""
