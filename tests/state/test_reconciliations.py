"""Proofs about tables, and claims of tables that are being compared."""

from __future__ import annotations

from dataclasses import replace

from deltaforge_dagster.state.reconciliations import TableProof
from deltaforge_dagster.state.store import StateStore

PROOF = TableProof("copy", "public.items", '{"lsn": "0/10"}', 1.0, 7)


def test_the_newest_proof_counts(store: StateStore) -> None:
    """There is one proof for each table of a sink, and those of other pipelines are theirs."""
    newer = replace(PROOF, verified_through='{"lsn": "0/20"}', rows=8)
    other = replace(PROOF, sink="another")
    for proof in (PROOF, other, newer):
        store.reconciliations.prove("feed", proof)
    store.reconciliations.prove("feed2", PROOF)

    assert store.reconciliations.proofs("feed") == [other, newer]
    assert newer.to_json()["verified_through"] == {"lsn": "0/20"}


def test_a_table_is_claimed_by_one(store: StateStore) -> None:
    """The holder may prolong its claim; others get it once it was released or has expired."""
    claims = store.reconciliations
    assert claims.claim("feed", "copy", "public.items", "first", 60)
    assert claims.claim("feed", "copy", "public.items", "first", 60)
    assert not claims.claim("feed", "copy", "public.items", "second", 60)
    assert claims.claim("feed", "copy", "public.orders", "second", 60)
    claims.release("feed", "copy", "public.items", "first", compared=True)
    assert claims.claim("feed", "copy", "public.items", "second", -1)
    assert claims.claim("feed", "copy", "public.items", "third", 60)
    claims.release("feed", "copy", "public.items", "second", compared=True)
    assert not claims.claim("feed", "copy", "public.items", "fourth", 60)


def test_when_a_table_was_compared(store: StateStore) -> None:
    """A comparison that was broken off has begun, and does not count as one."""
    claims = store.reconciliations
    assert (claims.last("feed", "copy", "t").begun, claims.last("feed", "copy", "t").ended) == (
        0,
        0,
    )
    claims.claim("feed", "copy", "t", "first", 60)
    begun = claims.last("feed", "copy", "t").begun
    claims.claim("feed", "copy", "t", "first", 60)
    assert claims.last("feed", "copy", "t").begun == begun > 0
    claims.release("feed", "copy", "t", "first", compared=False)
    assert (claims.last("feed", "copy", "t").begun, claims.last("feed", "copy", "t").ended) == (
        begun,
        0,
    )
    claims.claim("feed", "copy", "t", "second", 60)
    claims.release("feed", "copy", "t", "second", compared=True)
    last = claims.last("feed", "copy", "t")
    assert (last.holder, last.ended >= last.begun >= begun) == ("", True)
