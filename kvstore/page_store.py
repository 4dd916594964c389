"""What a node needs from the tier that keeps its pages. ``SsdTier`` is it; simulations bring one in memory.

``tests/simulation/test_memory_pages.py`` runs the same histories on both: what they answer must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, TypeVar

from cedar.kvstore.put import PutCounts, PutItem
from cedar.kvstore.tenants import TenantTable

if TYPE_CHECKING:
    from cedar.kvstore.ssd_tier import Run, StoredPage

T = TypeVar("T")


class PageStore(Protocol):
    """Immutable pages of one node; see ``SsdTier`` for what each method promises."""

    tenants: TenantTable

    def put(self, items: Sequence[PutItem]) -> Future[PutCounts]:
        """Store verified values; the future is set when they are durable. Refused, StoreClosed.

        Futures are set in the order of the calls.
        """

    def match(self, keys: Sequence[bytes], tenant: bytes = b"") -> int:
        """How many leading pages are held; a use of them."""

    def read_run(
        self,
        keys: Sequence[bytes],
        max_bytes: int,
        build: Callable[[list[memoryview]], T],
        *,
        use: bool = True,
    ) -> tuple[Run, T] | None:
        """Something built from verified leading pages; None when the first cannot be served."""

    def read_into(
        self,
        keys: Sequence[bytes],
        max_bytes: int,
        place: Callable[[int, int], Sequence[memoryview]],
        *,
        use: bool = True,
        wait: bool = True,
    ) -> Run | None:
        """The same, written where ``place(count, value_bytes)`` says. NotInMemory if it may not ``wait``."""

    def get(self, key: bytes) -> bytes | None:
        """One verified value. Not a use."""

    def announce(self, keys: Sequence[bytes]) -> None:
        """These will be read."""

    def now_s(self) -> float:
        """Store time."""

    def held(self, keys: Sequence[bytes]) -> list[bool]:
        """Which can be served."""

    def facts(self, key: bytes) -> tuple[int, bytes, float] | None:
        """(place, tenant, idle seconds) of a page that can be served."""

    def lost(self, key: bytes) -> bool:
        """Whether it was here and turned out damaged."""

    def listing(self, portion: int) -> Iterator[list[bytes]]:
        """All keys, in portions, last used first."""

    def page_tokens(self) -> int:
        """Tokens of a page."""

    def describe(self, key: bytes) -> StoredPage | None:
        """What is known of a page."""

    def why_unsound(self, key: bytes) -> str:
        """Why a page cannot be served: "" if it can, "gone" if it is not here."""

    def keys_held(self, *, tenant: bytes = b"", segment: int = 0) -> list[bytes]:
        """Keys that can be served, chain heads first."""

    def tenant_bytes(self) -> dict[bytes, int]:
        """Bytes held, by tenant."""

    def purge(self, tenant: bytes) -> tuple[list[bytes], int]:
        """Remove a tenant's pages: (keys, bytes) that went."""

    def stats(self) -> dict[str, float]:
        """Gauges."""

    def check_integrity(self, *, deep: bool = False) -> None:
        """AssertionError when the books do not balance."""

    def close(self) -> None:
        """Commit what is queued and close."""
