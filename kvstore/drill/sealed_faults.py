"""Faults of a store whose blocks in Redis are encrypted: values planted by whoever may write there."""

from kvstore.checksum import checksum
from kvstore.drill.fault import Fault
from kvstore.drill.redis_content import RedisContent
from kvstore.drill.remote_faults import RemoteFault, server_of
from kvstore.drill.stage import Stage
from kvstore.keys import BlockKey, PrefixChain
from kvstore.tenant import tenant_of
from kvstore.tier import SEALED_HEADER_BYTES, BlockHeader, BlockId
from kvstore_tiers.remote_session import KeyNames
from kvstore_tiers.sealing import DataKey, seal_payload

_NAMES = KeyNames("kvstore")


class SealedValuesPlanted(RemoteFault):
    """See the description."""

    name = "sealed_values_planted"
    description = (
        "every value in an encrypted Redis replaced: by a valid one in the clear, by one under a key of the"
        " planter's own, or by another block's"
    )
    weight = 2.0
    effect = "blocks_refused"
    is_encrypted = True

    def inject(self, stage: Stage) -> None:
        """Plant something for every block that is in Redis only, and ask for them."""
        chains = self.write(stage)
        headers = [header for chain in chains for header in _headers(stage, chain)]
        with RedisContent(server_of(stage).port) as content:
            stored = [content.get(_NAMES.of(header.block)) for header in headers]
            for index, header in enumerate(headers):
                others = [*stored[:index], *stored[index + 1 :]]
                content.put(_NAMES.of(header.block), self._value(stage, header, others))
        for chain in chains:
            served = stage.get(chain).blocks
            if served:
                stage.ledger.note_violation(f"{served} planted blocks were served")
            stage.ledger.note_effect(self.effect, not served)
            self.written.remove(chain)
            stage.client.drop(chain)

    def _value(self, stage: Stage, header: BlockHeader, others: list[bytes]) -> bytes:
        """Return a value whose header, checksum and length are right, of bytes that are not the block's."""
        payload = stage.rng.randbytes(stage.block_bytes)
        plain = header._replace(checksum=checksum(payload))
        way = stage.rng.randrange(3)
        if way == 0 and others:
            other = stage.rng.choice(others)
            theirs = BlockHeader.unpack(other[:SEALED_HEADER_BYTES])
            moved = header._replace(checksum=theirs.checksum, seal=theirs.seal)
            return moved.pack() + other[SEALED_HEADER_BYTES:]
        if way == 1:
            key, buffer = DataKey.make(tenant_of(b"")), memoryview(bytearray(len(payload)))
            sealed = seal_payload(key, plain, memoryview(payload), buffer)
            assert sealed is not None, "a payload that nobody changes has its checksum"
            return sealed.pack() + bytes(buffer)
        return plain.pack() + payload


def _headers(stage: Stage, chain: PrefixChain) -> list[BlockHeader]:
    layout = stage.namespace.layout
    parent = BlockKey(chain.namespace)
    headers: list[BlockHeader] = []
    for depth, key in enumerate(chain.keys):
        block = BlockId(chain.namespace, layout.whole, key)
        headers.append(BlockHeader(block, parent, depth, layout.fingerprint, stage.block_bytes, 0))
        parent = key
    return headers


def sealed_faults() -> tuple[Fault, ...]:
    """Return one of each kind."""
    return (SealedValuesPlanted(),)
