"""Workers of all three stages in one process, over real loopback gRPC, with the golden network."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from cedar.actors.config import DecodeConfig, EncoderConfig, PrefillConfig
from cedar.actors.decode_worker import DecodeWorker
from cedar.actors.encoder_worker import EncoderWorker
from cedar.actors.prefill_worker import PrefillWorker
from cedar.actors.wire_prompt import pack_ids
from cedar.actors.worker import StageWorker
from cedar.kvstore.client import StoreClient
from cedar.kvstore.config import NodeConfig, SsdConfig, WindowConfig
from cedar.kvstore.keys import chain_keys, root_key
from cedar.kvstore.node import StoreNode
from cedar.kvstore.rpc import ServiceStub, channel_options
from cedar.kvstore.window_match import longest_window, window_digest
from cedar.model import load_network
from cedar.model.network import Network
from cedar.model.sampling import SamplingParams as ModelSampling
from cedar.model.sampling import sample
from cedar.model.state import ImageSpan, KVMemory, SequenceState
from cedar.v1 import common_pb2, stages_pb2
from cedar.v1.common_pb2 import PromptSources, SamplingParams, TokenEvent
from cedar.v1.stages_pb2 import (
    DecodeCancelRequest,
    EncodeRequest,
    FeatureSource,
    PrefillDone,
    PrefillEvent,
    PrefillRequest,
    StreamEnd,
    StreamRequest,
    WindowRef,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "v41-tiny"
TENANT = b"\x07" * 32

_ids = itertools.count()


@pytest.fixture(autouse=True)
def nothing_is_left_unawaited(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [record.getMessage() for record in caplog.get_records("call") if record.name == "asyncio"]


@pytest.fixture(scope="session")
def network() -> Network:
    torch.set_num_threads(1)
    return load_network(str(GOLDEN))


@pytest.fixture(scope="session")
def prompt() -> Callable[[int, int], list[int]]:
    """Random token ids: (seed, length)."""

    def make(seed: int, length: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(5, 640) for _ in range(length)]

    return make


GREEDY = ModelSampling(temperature=0, ignore_eos=True)


class Single:
    """The same network in one process: what every path through the workers must give."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._cold: dict[tuple[Any, ...], list[int]] = {}

    def cold(
        self,
        ids: Sequence[int],
        count: int,
        sampling: ModelSampling = GREEDY,
        images: tuple[ImageSpan, ...] = (),
        features: dict[bytes, torch.Tensor] | None = None,
    ) -> list[int]:
        key = (tuple(ids), count, sampling, images)
        if key not in self._cold:
            memory, seq = self.network.own_sequence(list(ids), count)
            seq.images = images
            self._cold[key] = self.run(memory, seq, count, sampling, features)
        return self._cold[key]

    def run(
        self,
        memory: KVMemory,
        seq: SequenceState,
        count: int,
        sampling: ModelSampling = GREEDY,
        features: dict[bytes, torch.Tensor] | None = None,
    ) -> list[int]:
        self.network.prefill(memory, seq, len(seq.ids), features)
        logits = self.network.finish_prefill(memory, seq)
        tokens: list[int] = []
        while True:
            token = sample(logits, sampling, len(seq.ids))
            seq.ids.append(token.id)
            tokens.append(token.id)
            if len(tokens) == count:
                return tokens
            logits = self.network.decode(memory, [seq])[0]

    def replayed(
        self,
        ids: Sequence[int],
        hit_pages: int,
        count: int,
        images: tuple[ImageSpan, ...] = (),
        features: dict[bytes, torch.Tensor] | None = None,
    ) -> list[int]:
        """As after a hit of so many pages, which a cold run made, without window state."""
        memory, seq = self.network.own_sequence(list(ids), count)
        seq.images = images
        hits = hit_pages * self.network.layout.page_tokens
        self.network.prefill(memory, seq, hits, features)
        start = hits - self.network.config.window
        again = SequenceState(
            slot=0,
            pages=seq.pages,
            ids=list(ids),
            images=images,
            length=start,
            encoder_start=start,
            write_from=hits,
        )
        return self.run(memory, again, count, features=features)


@pytest.fixture(scope="session")
def single(network: Network) -> Single:
    return Single(network)


@dataclass
class Reply:
    """What one request came to."""

    tokens: list[TokenEvent] = field(default_factory=list)
    sources: PromptSources | None = None
    encoder_start: int = 0
    done: PrefillDone | None = None
    end: StreamEnd | None = None

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


class Rig:
    """Workers, and what the gateway does with them."""

    tenant = TENANT

    def __init__(self, network: Network, *, own_networks: bool = False) -> None:
        self.network = network
        self.shared = None if own_networks else network
        self.encoder: EncoderWorker | None = None
        self.prefill: PrefillWorker = None  # type: ignore[assignment]
        self.decodes: list[DecodeWorker] = []
        self.store: StoreNode | None = None
        self.client: StoreClient | None = None
        self.workers: list[StageWorker] = []
        self._channels: dict[str, grpc.aio.Channel] = {}
        layout = network.layout
        self.root = root_key(layout.format_id, network.fingerprint, TENANT)

    @property
    def decode(self) -> DecodeWorker:
        return self.decodes[0]

    async def start(
        self,
        *,
        encoder: bool = False,
        decodes: int = 1,
        prefill: dict[str, Any] | None = None,
        decode: dict[str, Any] | None = None,
        store: Path | None = None,
    ) -> None:
        settings: dict[str, Any] = {"checkpoint": str(GOLDEN), "drain_s": 0.0}
        if store is not None:
            ssd = SsdConfig(directory=store, capacity_bytes=64 << 20)
            self.store = StoreNode(NodeConfig(ssd=ssd, window=WindowConfig(budget_bytes=16 << 20)))
            settings["store"] = await self.store.start()
            self.client = StoreClient(settings["store"], fingerprint=self.network.fingerprint)
        if encoder:
            config = EncoderConfig(checkpoint=str(GOLDEN), drain_s=0.0)
            self.encoder = EncoderWorker(config, network=self.shared)
            self.workers.append(self.encoder)
        small = {"pages": 40, "slots": 4, "retry_after_ms": 10}
        self.prefill = PrefillWorker(
            PrefillConfig(**(settings | small | {"chunk_pages": 1} | (prefill or {}))), network=self.shared
        )
        self.decodes = [
            DecodeWorker(DecodeConfig(**(settings | small | (decode or {}))), network=self.shared)
            for _ in range(decodes)
        ]
        self.workers += [self.prefill, *self.decodes]
        for worker in self.workers:
            await worker.start()

    async def stop(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)
        for worker in self.workers:
            await worker.stop()
        if self.client is not None:
            await self.client.close()
        if self.store is not None:
            await self.store.stop()

    async def offer(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> dict[str, Any]:
        """What the gateway finds in the store for a prompt: request fields."""
        assert self.client is not None
        keys = self.keys(ids, images)
        match = await self.client.match(self.root, keys)
        page_tokens = self.network.layout.page_tokens
        found = longest_window(match.windows, self.root, keys, ids, images, page_tokens)
        window = None
        if found is not None:
            window = WindowRef(page_key=found.page_key, tokens=found.tokens, digest=found.digest)
        return {"hit_pages": match.pages, "window": window}

    def window(self, ids: Sequence[int], tokens: int) -> WindowRef:
        """The name of the state after the first ``tokens`` of a prompt."""
        keys, page_tokens = self.keys(ids), self.network.layout.page_tokens
        page_key, digest = window_digest(self.root, keys, ids, (), page_tokens, tokens)
        return WindowRef(page_key=page_key, tokens=tokens, digest=digest)

    async def encode(self, image: bytes) -> FeatureSource:
        """An image through the encoder worker, as the gateway has it done."""
        assert self.encoder is not None
        content_hash = self.network.prepare(image).content_hash
        stub = self.stub(self.encoder.address, "Encode")
        await stub.Encode(EncodeRequest(image=image, content_hash=content_hash, tenant=TENANT), timeout=30)
        return FeatureSource(content_hash=content_hash, encoder_address=self.encoder.address)

    def stub(self, address: str, service: str) -> ServiceStub:
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=channel_options())
        return ServiceStub(self._channels[address], stages_pb2.DESCRIPTOR.services_by_name[service])

    def keys(self, ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> list[bytes]:
        return chain_keys(self.root, ids, images, self.network.layout.page_tokens)

    def request(
        self,
        ids: Sequence[int],
        count: int,
        *,
        request_id: str | None = None,
        images: Sequence[ImageSpan] = (),
        features: Sequence[FeatureSource] = (),
        decode: int = 0,
        sampling: dict[str, Any] | None = None,
        window: WindowRef | None = None,
        **fields: Any,
    ) -> PrefillRequest:
        wire = {"temperature": 0, "ignore_eos": True, "max_tokens": count} | (sampling or {})
        worker = self.decodes[decode]
        return PrefillRequest(
            request_id=request_id or f"r{next(_ids)}",
            token_ids=pack_ids(ids),
            images=[
                common_pb2.ImageSpan(
                    start=i.start,
                    length=i.length,
                    rows=i.rows,
                    columns=i.columns,
                    content_hash=i.content_hash,
                )
                for i in images
            ],
            sampling=SamplingParams(**wire),
            root_key=self.root,
            page_keys=b"".join(self.keys(ids, images)),
            decode_address=worker.address,
            decode_incarnation=worker.incarnation,
            features=features,
            window=window,
            tenant=TENANT,
            **fields,
        )

    async def prefill_events(
        self, request: PrefillRequest, timeout: float = 60
    ) -> AsyncIterator[PrefillEvent]:
        call = self.stub(self.prefill.address, "Prefill").Prefill(request, timeout=timeout)
        async for event in call:
            yield event

    async def tokens(
        self, decode: int, request_id: str, start: int = 0
    ) -> tuple[list[TokenEvent], StreamEnd | None]:
        """Every token from ``start`` on, and the end."""
        found: list[TokenEvent] = []
        stub = self.stub(self.decodes[decode].address, "Decode")
        async for answer in stub.Stream(StreamRequest(request_id=request_id, from_index=start), timeout=60):
            if answer.HasField("end"):
                return found, answer.end
            found.append(answer.token)
        return found, None

    async def generate(self, request: PrefillRequest, decode: int = 0, start: int = 0) -> Reply:
        """Prefill, stream from Admitted on, and the final accounts."""
        reply = Reply()
        stream: asyncio.Task[Any] | None = None
        try:
            async for event in self.prefill_events(request):
                if event.HasField("admitted"):
                    reply.sources = event.admitted.sources
                    reply.encoder_start = event.admitted.encoder_start
                    stream = asyncio.create_task(self.tokens(decode, request.request_id, start))
                else:
                    reply.done = event.done
        except grpc.aio.AioRpcError:
            if stream is not None:
                with pytest.raises(grpc.aio.AioRpcError):
                    await stream
            raise
        assert stream is not None
        reply.tokens, reply.end = await stream
        return reply

    async def cancel(self, decode: int, request_id: str) -> bool:
        stub = self.stub(self.decodes[decode].address, "Decode")
        answer = await stub.Cancel(DecodeCancelRequest(request_id=request_id), timeout=10)
        return bool(answer.found)

    async def idle(self, seconds: float = 5.0) -> None:
        """Every worker's books are empty and balance, within ``seconds``."""
        deadline = asyncio.get_running_loop().time() + seconds
        while any(w.status().active or w.status().pages_leased for w in self.workers):
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(0.01)
        for worker in self.workers:
            worker.assert_idle()
            assert worker.healthy()


RigMaker = Callable[..., Any]


@pytest.fixture
def rig(network: Network, tmp_path: Path) -> RigMaker:
    """``async with rig(...) as cluster``: started workers; at the end they must be idle, then they stop."""

    @asynccontextmanager
    async def make(
        *,
        check_idle: bool = True,
        store: bool = False,
        own_networks: bool = False,
        other: Network | None = None,
        **options: Any,
    ) -> AsyncIterator[Rig]:
        cluster = Rig(other or network, own_networks=own_networks)
        try:
            await cluster.start(store=tmp_path / "store" if store else None, **options)
            yield cluster
            if check_idle:
                await cluster.idle()
        finally:
            await cluster.stop()

    return make
