"""Who has to go, and in which order.

Never a dedicated replica; none that became HOT less than `minimum_deployment_time_s` ago, unless the
newcomer is dedicated; and none of a model that is asked for together with the newcomer. Those that may go
do so in this order: on the fewest GPUs first, then the smallest, then the one that has been HOT longest.
Those that turn out not to be needed stay, the last of the order first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from ndif.cluster.deployment import Deployment
from ndif.cluster.ledger import CpuLedger, Ledger


def may_go(deployment: Deployment, displaces: float, together: Set[str]) -> bool:
    """Whether a HOT replica may be displaced by one that displaces what became HOT until then."""
    return (
        not deployment.dedicated
        and deployment.deployed <= displaces
        and deployment.model_key not in together
    )


def in_order(deployments: Iterable[Deployment]) -> list[Deployment]:
    """HOT replicas, the first to go first."""
    return sorted(
        deployments, key=lambda d: (len(d.gpu_mem_bytes_by_id), d.size_bytes, d.deployed, d.key)
    )


def smallest_first(cached: Iterable[Deployment]) -> list[Deployment]:
    """WARM replicas, the first to go first."""
    return sorted(cached, key=lambda d: (d.size_bytes, d.deployed, d.key))


def least(
    ordered: Sequence[Deployment], ledger: Ledger, size_bytes: int
) -> list[Deployment] | None:
    """Those of `ordered` that have to go before a model of this size fits.

    None if it does not fit even without all of them. Of what is returned, nobody could have stayed.
    """
    going: list[Deployment] = []
    for deployment in ordered:
        if ledger.room >= size_bytes:
            break
        ledger.release(deployment)
        going.append(deployment)
    if ledger.room < size_bytes:
        return None
    needed: list[Deployment] = []
    for deployment in reversed(going):
        ledger.claim(deployment)
        if ledger.room < size_bytes:
            ledger.release(deployment)
            needed.append(deployment)
    return needed[::-1]


def make_way(
    cached: Iterable[Deployment], free_bytes: int, size_bytes: int
) -> list[Deployment] | None:
    """The WARM replicas that are dropped so that another can become WARM; None if it cannot be."""
    return least(smallest_first(cached), CpuLedger(free_bytes), size_bytes)
