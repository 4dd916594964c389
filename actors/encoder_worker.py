"""The Encoder stage: images to features, kept in this worker's memory until fetched or expired.

Equal images of a tenant are encoded once, also when asked for at the same time; tenants share nothing, since
whether an image had to be encoded (and how long that took) would tell one what another has sent. The store
holds no features, so an image that has expired here is encoded again. Only the vision tower is loaded.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cedar.actors.config import EncoderConfig
from cedar.actors.engine_thread import EngineThread
from cedar.actors.errors import Busy, DeadlinePassed, InvalidRequest, NotFound
from cedar.actors.features import feature_frames
from cedar.actors.status import Context
from cedar.actors.worker import StageWorker
from cedar.kvstore.keys import CONTENT_HASH_BYTES
from cedar.v1.stages_pb2 import EncodeRequest, EncodeResponse, FeaturesRequest, WorkerStatus

if TYPE_CHECKING:
    from cedar.model.network import Network


@dataclass(frozen=True)
class Features:
    """bf16 rows ``[rows, width]`` of one image's span, and its token grid."""

    data: bytes
    rows: int
    width: int
    grid_rows: int
    grid_columns: int


class FeatureKey(NamedTuple):
    """Whose image, and which."""

    tenant: bytes
    content_hash: bytes


class FeatureCache:
    """Least-recently-used features within a byte budget, each at most ``ttl_s`` after its last use. Pure."""

    def __init__(self, budget_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        self._budget = budget_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[FeatureKey, tuple[Features, float]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: FeatureKey) -> Features | None:
        """The features, if they are here and have not expired; that counts as a use."""
        self.expire()
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        self._entries[key] = (entry[0], self._clock())
        return entry[0]

    def put(self, key: FeatureKey, features: Features) -> None:
        """Keep features; older ones leave when the budget is passed; one over all of it is not kept."""
        self._drop(key)
        if len(features.data) > self._budget:
            return
        self._entries[key] = (features, self._clock())
        self.bytes += len(features.data)
        while self.bytes > self._budget:
            self._drop(next(iter(self._entries)))

    def expire(self) -> None:
        """Drop what nobody used for ``ttl_s``."""
        limit = self._clock() - self._ttl_s
        while self._entries:
            oldest = next(iter(self._entries))
            if self._entries[oldest][1] > limit:
                return
            self._drop(oldest)

    def _drop(self, key: FeatureKey) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes -= len(entry[0].data)


class EncoderWorker(StageWorker):
    """Serves ``Encode`` and ``Worker``."""

    stage = "encoder"

    def __init__(
        self,
        config: EncoderConfig,
        *,
        network: Network | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config)
        self.config = config
        self.features = FeatureCache(config.cache_bytes, config.cache_ttl_s, clock)
        self._network = network
        self._running: dict[FeatureKey, asyncio.Task[Features]] = {}

    async def Encode(self, request: EncodeRequest, context: Context) -> EncodeResponse:
        """Run the tower, or find that it has run."""
        async with self._answering(context):
            with self.working():
                begun = time.monotonic()
                if len(request.content_hash) != CONTENT_HASH_BYTES:
                    got = f"{len(request.content_hash)} bytes"
                    raise InvalidRequest("content_hash", got, f"must be {CONTENT_HASH_BYTES} bytes")
                self.counters["encode_requests"] += 1
                key = FeatureKey(request.tenant, request.content_hash)
                features = self.features.get(key)
                cached = features is not None
                if features is None:
                    features = await self._encode(key, request.image)
                return EncodeResponse(
                    rows=features.grid_rows,
                    columns=features.grid_columns,
                    feature_bytes=len(features.data),
                    cached=cached,
                    seconds=time.monotonic() - begun,
                )

    async def GetFeatures(self, request: FeaturesRequest, context: Context) -> AsyncGenerator[bytes]:
        """The rows of an image that was encoded here, or is being encoded now."""
        async with self._answering(context):
            with self.working():
                key = FeatureKey(request.tenant, request.content_hash)
                features = self.features.get(key)
                running = self._running.get(key)
                if features is None and running is not None:
                    features = await self._wait(running)
                if features is None:
                    self.counters["features_not_found"] += 1
                    raise NotFound(
                        f"features of {request.content_hash.hex()[:16]} are not here, or have expired"
                    )
                for frame in feature_frames(
                    request.content_hash, features.rows, features.width, features.data
                ):
                    self.counters["feature_bytes_sent"] += len(frame)
                    yield frame

    async def _encode(self, key: FeatureKey, image: bytes) -> Features:
        running = self._running.get(key)
        if running is None:
            if len(self._running) >= self.config.max_queue:
                raise Busy(
                    f"{len(self._running)} images wait already: at most {self.config.max_queue}",
                    retry_after_ms=self.config.retry_after_ms,
                )
            running = asyncio.create_task(self._run(key, image))
            self._running[key] = running
            running.add_done_callback(lambda task: self._ended(key, task))
        return await self._wait(running)

    def _ended(self, key: FeatureKey, task: asyncio.Task[Features]) -> None:
        self._running.pop(key, None)
        if not task.cancelled():
            task.exception()  # seen, also when everybody who waited has left

    async def _wait(self, running: asyncio.Task[Features]) -> Features:
        """The result of a run that others may wait for too, and that goes on when one of them leaves."""
        done, _ = await asyncio.wait([running], timeout=self.config.encode_timeout_s)
        if not done:
            raise DeadlinePassed(f"the image was not encoded within {self.config.encode_timeout_s:g} s")
        return running.result()

    async def _run(self, key: FeatureKey, image: bytes) -> Features:
        thread = self._thread
        assert thread is not None
        features = await thread.call(lambda: self._tower(key.content_hash, image))
        self.features.put(key, features)
        self.counters["images_encoded"] += 1
        return features

    def _tower(self, content_hash: bytes, image: bytes) -> Features:
        """Decode, check and encode one image file. Engine thread only."""
        import torch
        from cedar.model.images import ImageLimits, prepare_image

        network, config = self._network, self.config
        assert network is not None
        assert network.config.vision is not None
        limits = ImageLimits(max_bytes=config.max_image_bytes, max_pixels=config.max_image_pixels)
        prepared = prepare_image(image, network.config.vision, limits)
        if prepared.content_hash != content_hash:
            got = content_hash.hex()[:16]
            raise InvalidRequest("content_hash", got, f"the image's own, {prepared.content_hash.hex()[:16]}")
        rows = network.encode_image(prepared).contiguous()
        data = rows.cpu().view(torch.uint8).numpy().tobytes()
        return Features(data, rows.shape[0], rows.shape[1], prepared.plan.rows, prepared.plan.columns)

    async def _open(self, thread: EngineThread) -> None:
        if self._network is None:
            from cedar.model import load_network

            config = self.config
            self._network = await thread.call(
                lambda: load_network(config.checkpoint, device=config.device, stage="encoder")
            )
        if self._network.vision is None:
            from cedar.model.errors import ConfigError

            raise ConfigError("vision_config", None, "present: an encoder worker needs a vision tower")

    async def _close(self) -> None:
        for task in list(self._running.values()):
            task.cancel()
        if self._running:
            await asyncio.wait(list(self._running.values()))

    def _describe(self, status: WorkerStatus) -> None:
        self.features.expire()
        status.queued = len(self._running)
        if self._network is not None:
            status.fingerprint = self._network.fingerprint
        status.counters["cache_entries"] = len(self.features)
        status.counters["cache_bytes"] = self.features.bytes

    def _service(self) -> str:
        return "Encode"
