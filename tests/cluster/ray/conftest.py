"""Ray in the process of the tests, as in a leader's: imported after the package that sets it up."""

import ndif.cluster.ray as _  # noqa: F401
