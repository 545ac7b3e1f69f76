"""The GPUs of a local server: the fewest that hold the model beside other programs of the machine."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence

from ndif.config.settings import Settings
from ndif.host.evaluation import EvaluationError, Evaluator
from ndif.host.fork_server import ForkServers
from ndif.host.gpus import Driver, DriverError, Gpu
from ndif.host.runner_pool import context_bytes
from ndif.host.runtimes import Runtime
from ndif.placement.packing import fewest
from ndif.schema.deployment import DeploymentConfig

logger = logging.getLogger(__name__)


def choose(
    total: Sequence[int], free: Sequence[int], size_bytes: int, context: int
) -> dict[int, int] | None:
    """Return the fewest GPUs whose free memory holds a model, and the bytes of each for its tensors.

    A single GPU may be used up, should other programs leave it. Several GPUs give what is free now, because
    the model is divided by these sizes. None if all GPUs together do not hold the model.
    """
    room = [max(0, each - context) for each in free]
    chosen = fewest(((each, index) for index, each in enumerate(room)), size_bytes)
    if len(chosen) == 1:
        return {chosen[0]: total[chosen[0]] - context}
    return {index: room[index] for index in chosen} or None


class LocalCards:
    """Choose GPUs for each replica of a local server.

    Asks the driver what is free and an evaluator what the model takes, and remembers the choices of
    replicas that still load. The model process goes where it likes, which is over all GPUs, if either
    cannot be told, if all GPUs together do not hold the model, or if torch finds none.
    """

    def __init__(
        self,
        settings: Settings,
        driver: Driver,
        gpus: Sequence[Gpu],
        fork_servers: ForkServers,
        *,
        trusted: bool,
    ) -> None:
        """Prepare to choose among `gpus`, in the order in which torch counts them."""
        self._driver = driver
        self._gpus = gpus
        self._context = context_bytes(settings, untrusted=not trusted, trusted=trusted)
        self._evaluator = Evaluator(fork_servers=fork_servers, look_for_cuda=True)
        self._loading: Counter[int] = Counter()
        """Bytes of each GPU that loading replicas will take."""

    @contextlib.asynccontextmanager
    async def chosen(
        self, config: DeploymentConfig, runtime: Runtime
    ) -> AsyncIterator[Mapping[int, int] | None]:
        """Choose GPUs for a replica, and reserve them while it loads."""
        if len(self._gpus) < 2 or config.device is not None:
            yield None
            return
        claimed: Counter[int] = Counter()
        memory = None
        try:
            found = await self._evaluator(config, runtime)
            free = await self._free()
        except (EvaluationError, DriverError) as error:
            logger.warning("the model is spread over all GPUs: %s", error)
            found = None
        if found is not None and found.cuda:
            total = [gpu.usable_bytes or 0 for gpu in self._gpus]
            memory = choose(total, free, found.size_bytes, self._context)
            for index in memory or ():
                claimed[index] = found.size_bytes // len(memory or ()) + self._context
        self._loading += claimed
        try:
            yield memory
        finally:
            self._loading -= claimed

    async def _free(self) -> list[int]:
        """Return the free bytes of each GPU that are not reserved, or raise a `DriverError`."""
        cards, _ = await self._driver.physical_gpus()
        free = {card.gpu.uuid: card.gpu.free_bytes for card in cards}
        left = [free.get(gpu.uuid, 0) - self._loading[i] for i, gpu in enumerate(self._gpus)]
        return [max(0, each) for each in left]

    async def close(self) -> None:
        """End the evaluator."""
        await self._evaluator.stop()
