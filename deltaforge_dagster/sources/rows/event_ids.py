"""Event ids: a change has the same id each time it is read, by any process.

An id is a UUID of version 7 (RFC 9562, section 5.7) as text. Its 74 free bits are a hash of
(source id, numbers that identify the transaction, index of the change in it)::

     0                48   52            64 66                                    128
    +------------------+----+-------------+--+---------------------------------------+
    | commit time, ms  | 7  | chain a, 12 |10| chain b, low 62 bits                  |
    +------------------+----+-------------+--+---------------------------------------+

Two independent chains start from the halves of a 128-bit BLAKE2b hash of the source id, and hash
one number after the other: `h = mix(h ^ number)`. Each `mix` is a bijection of 64 bits that spreads
every input bit over all output bits (chain a: the finalizer of MurmurHash3, chain b: "variant 13"
of SplitMix64). So all ids of one transaction differ in chain b, apart from the two of its bits that
the variant field replaces. The chance that any two of a million changes with the same commit time
share an id is about 3 in 10^11.

Each source chooses the numbers that identify a transaction, and feeds the chains in its own kernel.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from deltaforge_dagster.kernels.runtime import MINUS, Bytes, kernel

ID_SIZE = 36
"""Characters of an id."""

_A1, _A2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)  # fmix64 of MurmurHash3
_B1, _B2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # variant 13 of SplitMix64
_S27, _S30, _S31, _S33 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(33)
_S4, _S16, _LOW = np.uint64(4), np.uint64(16), np.uint64(15)
_VERSION, _VARIANT = np.uint64(7 << 12), np.uint64(0x8000000000000000)
_LOW_12, _LOW_48, _LOW_62 = np.uint64(0xFFF), np.uint64((1 << 48) - 1), np.uint64((1 << 62) - 1)
_DIGITS = np.frombuffer(b"0123456789abcdef", np.uint8).copy()


def id_seed(source_id: str) -> npt.NDArray[np.uint64]:
    """Return the initial values of the two chains for a source."""
    digest = hashlib.blake2b(source_id.encode(), digest_size=16, person=b"event_id").digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


@kernel
def mix_a(h: np.uint64) -> np.uint64:
    """Apply the mix function of chain a (the finalizer of MurmurHash3)."""
    h = (h ^ (h >> _S33)) * _A1
    h = (h ^ (h >> _S33)) * _A2
    return h ^ (h >> _S33)


@kernel
def mix_b(h: np.uint64) -> np.uint64:
    """Apply the mix function of chain b ("variant 13" of SplitMix64)."""
    h = (h ^ (h >> _S30)) * _B1
    h = (h ^ (h >> _S27)) * _B2
    return h ^ (h >> _S31)


@kernel
def write_event_id(ts_us: int, a: np.uint64, b: np.uint64, out: Bytes, at: int) -> int:
    """Write the event id (36 bytes) at `out[at]`; return the offset after it.

    `a` and `b` are the final values of both chains.
    """
    millis = np.uint64(ts_us // 1000) & _LOW_48
    high = (millis << _S16) | _VERSION | (a & _LOW_12)
    low = _VARIANT | (b & _LOW_62)
    for digit in range(16):
        # Hyphens stand at 8, 13, 18 and 23: before the digits 8, 12, 16 and 20.
        index = 15 - digit
        shift_high = index + (index >= 8) + (index >= 12)
        out[at + shift_high] = _DIGITS[high & _LOW]
        out[at + 19 + index + (index >= 4)] = _DIGITS[low & _LOW]
        high >>= _S4
        low >>= _S4
    out[at + 8] = MINUS
    out[at + 13] = MINUS
    out[at + 18] = MINUS
    out[at + 23] = MINUS
    return at + ID_SIZE
